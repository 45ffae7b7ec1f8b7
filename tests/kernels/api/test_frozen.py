"""Backward passes without gradients of parameters: the others are as they were, and less is launched."""

import fusednorm
import pytest
import torch
from fusednorm import cpu, reference
from fusednorm.api import autograd
from fusednorm.results import Backward

# Of most algorithms one: shape, groups or none, channels-last.
SHAPES = {
    "tiles of rows": ((6, 80), 0, False),
    "rows in parts": ((2, 20_000), 0, False),
    "rows of heads": ((3, 4, 32), 0, False),
    "tiles of groups": ((3, 8, 5), 4, False),
    "groups that programs share": ((1, 8, 48, 48), 2, False),
    "channels-last": ((2, 16, 9, 5), 4, True),
    "channels-last, one position": ((4, 16, 1, 1), 4, True),
}


class Call:
    def __init__(self, name, device, rms=False):
        shape, groups, channels_last = SHAPES[name]
        x, dy = (torch.randn(shape, device=device) for _ in range(2))
        if channels_last:
            x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
        size = shape[1] if groups else shape[-2:] if "heads" in name else shape[-1]
        parameters = [torch.randn(size, device=device) for _ in range(1 if rms else 2)]
        self.op = "group_norm" if groups else "rms_norm" if rms else "layer_norm"
        self.x, self.arguments = x, (dy, x, *((groups,) if groups else ()), *parameters)

    def __call__(self, library=fusednorm, **options):
        return getattr(library, f"{self.op}_backward")(*self.arguments, activation="silu", **options)


@pytest.mark.parametrize(
    ("name", "rms"), [*((name, False) for name in SHAPES), ("tiles of rows", True), ("rows of heads", True)]
)
def test_dx_is_the_same_without_gradients_of_parameters(name, rms, device, poisoned):
    call = Call(name, device, rms)
    whole = call()
    alone = call(parameter_gradients=False)
    assert torch.equal(alone.dx, whole.dx)
    assert alone.dweight is alone.dbias is None
    assert whole.dweight is not None


# Where a column has one program for all rows, as in rows in parts, nothing is reduced in any case.
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "rows in parts"])
def test_nothing_is_reduced(name, device, plans):
    call = Call(name, device)
    call()
    call(parameter_gradients=False)
    whole, alone = plans
    assert len(alone) == len(whole) - 1


def test_scale_and_shift_have_gradients_of_their_own(device, poisoned):
    call = Call("channels-last", device)
    scale, shift = torch.randn(2, *call.x.shape[:2], device=device)
    whole = call(scale=scale, shift=shift)
    alone = call(scale=scale, shift=shift, parameter_gradients=False)
    for name in ("dx", "dscale", "dshift"):
        assert torch.equal(getattr(alone, name), getattr(whole, name))
    assert alone.dweight is alone.dbias is None


@pytest.mark.parametrize("library", [cpu, reference])
@pytest.mark.parametrize("name", ["tiles of rows", "tiles of groups", "channels-last"])
def test_on_a_cpu(name, library):
    call = Call(name, "cpu")
    shape = (call.x.shape[0], SHAPES[name][1]) if SHAPES[name][1] else call.x.shape[:-1]
    statistics = {"mean": torch.randn(shape) / 8, "rstd": torch.rand(shape) + 0.5}
    whole = call(library, **statistics)
    alone = call(library, parameter_gradients=False, **statistics)
    torch.testing.assert_close(alone.dx, whole.dx)
    assert alone.dweight is alone.dbias is None
    assert whole.dbias is not None


def test_a_place_for_a_gradient_that_is_not_wanted_is_refused(device):
    call = Call("tiles of rows", device)
    out = Backward(torch.empty_like(call.x), torch.empty(80, device=device))
    with pytest.raises(fusednorm.KernelInputError, match=r"out\.dweight must be None"):
        call(parameter_gradients=False, out=out)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm"])
def test_none_are_computed_of_frozen_parameters(op, device, monkeypatch):
    wanted = []
    run = autograd.run_backward

    def noted(*arguments, parameter_gradients, **options):
        wanted.append(parameter_gradients)
        return run(*arguments, parameter_gradients=parameter_gradients, **options)

    monkeypatch.setattr(autograd, "run_backward", noted)
    made = {"layer_norm": fusednorm.LayerNorm, "rms_norm": fusednorm.RMSNorm}
    # An activation, for torch's own norms serve CPU tensors without.
    module = fusednorm.GroupNorm(2, 8, activation="silu") if op == "group_norm" else made[op](8, activation="silu")
    module = module.to(device)
    x = torch.randn(3, 8, device=device, requires_grad=True)
    module(x).sum().backward()
    module.requires_grad_(False)
    module(x).sum().backward()
    module.weight.requires_grad_()
    module(x).sum().backward()
    assert wanted == [True, False, True]
