"""The service's modules beside those of the kernel library, and what a client of theirs has asked for."""

import fusednorm
import torch
from normserve.client import Client
from normserve.client import torch as remote
from normserve.client.local.connection import LocalTransport

KINDS = {
    "layer norm": ("LayerNorm", (16,), {}, (3, 5, 16)),
    "layer norm of two axes": ("LayerNorm", ((4, 8),), {}, (3, 2, 4, 8)),
    "layer norm without bias": ("LayerNorm", (16,), {"bias": False, "eps": 1e-2}, (6, 16)),
    "layer norm without parameters": ("LayerNorm", (16,), {"elementwise_affine": False}, (6, 16)),
    "layer norm over channels": ("LayerNorm", (12,), {"layout": "nchw"}, (2, 12, 4, 5)),
    "RMS norm over channels": ("RMSNorm", (12,), {"layout": "nchw"}, (2, 12, 7)),
    "RMS norm": ("RMSNorm", (16,), {}, (2, 6, 16)),
    "RMS norm of two axes": ("RMSNorm", ((4, 8),), {"eps": 1e-2}, (3, 4, 8)),
    "RMS norm without parameters": ("RMSNorm", (16,), {"elementwise_affine": False}, (16,)),
    "group norm": ("GroupNorm", (3, 12), {}, (2, 12, 4, 5)),
    "group norm of vectors": ("GroupNorm", (3, 12), {"affine": False}, (5, 12)),
    "group norm of sequences": ("GroupNorm", (4, 12), {"eps": 1e-2}, (2, 12, 7)),
}


TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 1e-2, "atol": 2e-2},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-1},
}


class Watched(Client):
    """A client that knows which calls it has made, and where the results lay."""

    calls = ()
    addresses = ()

    def _run_call(self, call):
        result = super()._run_call(call)
        # Over shared memory, calls that come again are none.
        if not isinstance(self._transport, LocalTransport):
            self._watch(call, result)
        return result

    def _run_cacheable(self, transport, first, build, args, kwargs):
        call, result = build(*args, **kwargs), super()._run_cacheable(transport, first, build, args, kwargs)
        self._watch(call, result)
        return result

    def _watch(self, call, result):
        self.calls = (*self.calls, call)
        tensors = [value for value in map(result.__getattribute__, result.__slots__) if torch.is_tensor(value)]
        self.addresses = (*self.addresses, *(tensor.data_ptr() for tensor in tensors))


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(client, kind, dtype=torch.float32, **more):
    """The kernel library's module, the service's with its parameters, and the shape of an x."""
    name, arguments, options, shape = KINDS[kind]
    reference = getattr(fusednorm, name)(*arguments, **options, **more, dtype=dtype)
    for seed, parameter in enumerate(reference.parameters()):
        parameter.data = random(*parameter.shape, seed=seed + 10, dtype=dtype)
    module = getattr(remote, name)(*arguments, **options, **more, dtype=dtype, client=client)
    module.load_state_dict(reference.state_dict())
    return reference, module, shape


def passes(module, x, *more, dy=None):
    """y, and the gradients of x, of what else went in, and of the parameters."""
    inputs = [x.detach().requires_grad_(), *(tensor.detach().requires_grad_() for tensor in more)]
    y = module(*inputs)
    dy = random(*y.shape, seed=7, dtype=y.dtype) if dy is None else dy
    gradients = torch.autograd.grad(y, [*inputs, *module.parameters()], dy)
    return y.detach(), *gradients


def assert_same(got, expected, dtype=torch.float32):
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **TOLERANCES[dtype])
