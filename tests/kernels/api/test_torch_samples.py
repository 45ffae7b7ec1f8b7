"""Torch's own samples of its norms: what torch refuses is refused, what it computes computed, or refused plainly.

What is left out of what torch computes, and why:

- eps below 0, which makes NaN of constant rows: refused everywhere;
- complex rows, which rms_norm of torch takes: refused everywhere;
- on a GPU float64, for which there are no kernels.
"""

import re
import subprocess
import sys
from pathlib import Path

import fusednorm
import pytest
import torch
from fusednorm import KernelInputError
from torch import nn

from tests.kernels.api.torch_samples import NAMES

# To ask torch for its samples takes it ten seconds; layouts, dtypes and refusals have tests of their own.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# Of the largest element, of results and gradients, against torch's in float64.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Torch's samples by the name of the operation."""
    file = tmp_path_factory.mktemp("samples") / "samples.pt"
    program = [sys.executable, "-m", "tests.kernels.api.torch_samples", str(file)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    by_name = {name: [] for name in NAMES}
    for sample in torch.load(file):
        by_name[sample["name"]].append(sample)
    return by_name


def on(device, value):
    return value.detach().to(device).requires_grad_() if isinstance(value, torch.Tensor) else value


def arguments(sample, device):
    """x and the other arguments by torch's names, on a device."""
    order = {
        "nn.functional.group_norm": ("num_groups", "weight", "bias", "eps"),
        "nn.functional.rms_norm": ("normalized_shape", "weight", "eps"),
    }.get(sample["name"], ("normalized_shape", "weight", "bias", "eps"))
    given = dict(zip(order, sample["args"], strict=False)) | sample["kwargs"]
    return on(device, sample["x"]), {name: on(device, value) for name, value in given.items()}


def widened(x, given):
    """The same in float64."""
    wide = {k: v.detach().double().requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    return x.detach().double().requires_grad_(), wide


def of_torch(name, x, given):
    if name == "native_layer_norm":
        shape = given["normalized_shape"]
        return torch.native_layer_norm(x, shape, given.get("weight"), given.get("bias"), given["eps"])[0]
    return getattr(nn.functional, name.rpartition(".")[2])(x, **given)


def ours(name, x, given, layout=None):
    """The same by this library: groups by the function, rows by the module, which knows their axes."""
    if "group" in name:
        return fusednorm.group_norm(x, **given)
    eps = {"eps": given["eps"]} if "eps" in given else {}
    kind = fusednorm.RMSNorm if "rms" in name else fusednorm.LayerNorm
    module = kind(given["normalized_shape"], **eps, elementwise_affine=False, layout=layout)
    # As they are: a parameter of a module would be a leaf of its own.
    for parameter in ("weight", "bias"):
        if given.get(parameter) is not None:
            delattr(module, parameter)
            setattr(module, parameter, given[parameter])
    return module(x)


def left_out(x, given):
    """Why a sample that torch computes may be refused, as errors say it."""
    reasons = []
    if given.get("eps") is not None and given["eps"] < 0:
        reasons.append("eps must be at least 0 and finite")
    if x.is_complex():
        reasons.append("x must be float32")
    if x.is_cuda and x.dtype == torch.float64:
        reasons.append(r"x must be float32, float16 or bfloat16, got torch\.float64")
    return reasons


def over_channels(name, x, given):
    """The same over the channels of contiguous [N, C, *spatial], in place of the last axis."""
    return ours(name, x.movedim(-1, 1).contiguous(), given, layout="nchw").movedim(1, -1)


def result_or_refusal(name, x, given, compute):
    try:
        return compute(name, x, given), ""
    except KernelInputError as error:
        return None, str(error)


def assert_close(got, want, dtype):
    assert got.dtype == dtype
    assert got.shape == want.shape
    if want.numel():
        error = (got.double() - want).abs().max()
        assert error <= TOLERANCES[dtype] * want.abs().max().clamp_min(1.0)


def tensors_of(x, given):
    return [t for t in (x, *given.values()) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(
    ("name", "compute"), [*((name, ours) for name in NAMES), *((name, over_channels) for name in NAMES[1:3])]
)
def test_what_torch_computes(name, compute, samples, device):
    computed = 0
    for sample in samples[name]:
        if sample["refused"]:
            continue
        x, given = arguments(sample, device)
        if compute is over_channels and (x.dim() < 2 or len(given["normalized_shape"]) > 1):
            continue
        y, refusal = result_or_refusal(name, x, given, compute)
        if y is None:
            assert any(re.search(reason, refusal) for reason in left_out(x, given)), (refusal, x.shape, given)
            continue
        if "rms" in name:
            given.setdefault("eps", torch.finfo(x.dtype).eps)
        wide_x, wide = widened(x, given)
        want = of_torch(name, wide_x, wide)
        dy = torch.randn(want.shape, device=device).to(x.dtype)
        gradients = torch.autograd.grad(y, tensors_of(x, given), dy)
        wanted = torch.autograd.grad(want, tensors_of(wide_x, wide), dy.double())
        for one, its_own in zip((y, *gradients), (want, *wanted), strict=True):
            assert_close(one, its_own, x.dtype)
        computed += 1
    assert computed > 10


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nn.functional.layer_norm"])
def test_what_torch_refuses(name, samples, device):
    refused = [sample for sample in samples[name] if sample["refused"]]
    assert refused
    for sample in refused:
        x, given = arguments(sample, device)
        with pytest.raises(RuntimeError):
            of_torch(name, x, given)
        with pytest.raises(KernelInputError):
            ours(name, x, given)
