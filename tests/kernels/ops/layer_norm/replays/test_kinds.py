"""Which calls of LayerNorm and RMSNorm are launched again without checks and plan; the driver only takes notes."""

import fusednorm
import pytest
import torch
from fusednorm.api import autograd
from fusednorm.api import layer_norm as layer_norm_passes
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.launch import prepared_kernels, replay_cache
from fusednorm.ops.layer_norm import choices
from fusednorm.policy import cooperative_launches
from fusednorm.results import Forward

from tests.kernels.api.norm_calls import Dispatched
from tests.kernels.ops.layer_norm.replays.operands import BIAS, COLS, WEIGHT, WRONG_BACKWARD, backward, call

# Its driver stands in for one that is absent; launch/test_launches_gpu.py has the real one.
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")


CHANGES = {
    "dtype": {"x": torch.randn(3, COLS).half()},
    "columns": {"x": torch.randn(3, 32), "weight": WEIGHT[:32], "bias": BIAS[:32]},
    "strides": {"x": torch.randn(3, 2 * COLS)[:, :COLS]},
    "weight": {"weight": None},
    "weight's dtype": {"weight": WEIGHT.half()},
    "bias": {"bias": None},
    "bias's dtype": {"bias": BIAS.bfloat16()},
    "residual": {"residual": torch.randn(3, COLS)},
    "eps": {"eps": 1e-3},
    "weight offset": {"weight_offset": 1.0},
    "activation": {"activation": "silu"},
    "negative slope": {"activation": "leaky_relu", "negative_slope": 0.25},
    "y's dtype": {"out_dtype": torch.float16},
    "statistics": {"stats": True},
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_decides_a_launch_tells_calls_apart(what, replaying):
    call()
    assert not replaying.is_repeated(lambda: call(**CHANGES[what]))
    assert replaying.is_repeated(lambda: call(**CHANGES[what]))
    assert replaying.is_repeated(call)


def test_the_operation_and_the_residuals_dtype_and_strides_tell_calls_apart(replaying):
    x = torch.randn(3, COLS)
    call(x, bias=None)
    assert not replaying.is_repeated(lambda: fusednorm.rms_norm_forward(x, WEIGHT, eps=1e-5))
    for residual in (torch.randn(3, COLS), torch.randn(3, COLS).half(), torch.randn(3, 2 * COLS)[:, :COLS]):
        assert not replaying.is_repeated(lambda r=residual: call(x, residual=r))
        assert replaying.is_repeated(lambda r=residual: call(x, residual=r))


def test_whether_programs_may_wait_tells_calls_apart(replaying, monkeypatch):
    monkeypatch.setattr(cooperative_launches, "INTERPRETED", False)
    monkeypatch.setattr(cooperative_launches, "_allowed", True)
    fusednorm.allow_waiting(False)
    call()
    fusednorm.allow_waiting(True)
    assert not replaying.is_repeated(call)
    assert replaying.is_repeated(call)


NEVER = {
    "dropout": {"dropout": 0.5, "seed": 1},
    "a seed": {"seed": 1},
    "no rows": {"x": torch.randn(0, COLS)},
    "misaligned x": {"x": torch.randn(3 * COLS + 1)[1:].view(3, COLS)},
    "misaligned weight": {"weight": torch.randn(COLS + 1)[1:]},
    "misaligned residual": {"residual": torch.randn(3 * COLS + 1)[1:].view(3, COLS)},
}


@pytest.mark.parametrize("what", NEVER)
def test_calls_that_follow_no_rule_are_planned_each_time(what, replaying):
    call()
    call(**{"residual": torch.randn(3, COLS)} if "residual" in what else {})
    for _ in range(2):
        assert not replaying.is_repeated(lambda: call(**NEVER[what]))


WRONG = {
    "weight's length": {"weight": WEIGHT[:32]},
    "weight's dtype": {"weight": WEIGHT.double()},
    "weight's stride": {"weight": torch.randn(2 * COLS)[::2]},
    "weight's axes": {"weight": WEIGHT[None, None]},
    "x's dtype": {"x": torch.randn(3, COLS).double()},
    "x's stride": {"x": torch.randn(COLS, 3).T},
    "x's axes": {"x": torch.randn(())},
    "the residual's rows": {"residual": torch.randn(4, COLS)},
    "the residual's axes": {"residual": torch.randn(1, 3, COLS)},
    "eps": {"eps": -1.0},
    "weight offset": {"weight_offset": 0.5},
    "activation": {"activation": "tanh"},
    "an activation without a hash": {"activation": ["silu"]},
    "dropout": {"dropout": 1.0, "seed": 1},
    "the seed": {"seed": 2**63},
    "y's dtype": {"out_dtype": torch.int8},
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_calls_are_refused_after_right_ones(what, replaying):
    call()
    call(residual=torch.randn(3, COLS))
    for _ in range(2):
        with pytest.raises((fusednorm.KernelInputError, fusednorm.UnsupportedShapeError)):
            call(**WRONG[what])
    assert not replaying.launched


@pytest.mark.parametrize("what", WRONG_BACKWARD)
def test_wrong_backward_calls_are_refused_after_right_ones(what, replaying, plans):
    backward()
    backward(dresidual_out=torch.randn(3, COLS))
    for _ in range(2):
        with pytest.raises((fusednorm.KernelInputError, fusednorm.UnsupportedShapeError)):
            backward(**WRONG_BACKWARD[what])
    assert not replaying.launched
    assert replaying.is_repeated(backward)


def test_kinds_are_bounded_and_the_oldest_goes(replaying, monkeypatch):
    monkeypatch.setattr(replay_cache, "MAX_KINDS", 3)
    for eps in (1.0, 2.0, 3.0, 4.0):
        call(eps=eps)
    assert len(replay_cache._KNOWN) == 3
    assert replaying.is_repeated(lambda: call(eps=4.0))
    assert not replaying.is_repeated(lambda: call(eps=1.0))


def test_a_watched_call_is_planned(replaying, monkeypatch):
    call()
    monkeypatch.setattr(prepared_kernels, "can_bypass_triton", lambda: False)
    assert not replaying.is_repeated(call)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("adds", [False, True])
def test_a_differentiable_call_of_a_known_kind_is_repeated_unless_it_is_watched(
    adds, gradients, replaying, monkeypatch
):
    # Plain norms of CPU tensors are torch's before they are anything known.
    monkeypatch.setattr(autograd, "select_library", lambda op, x: fusednorm.reference)
    x, weight = (t.clone().requires_grad_(gradients) for t in (torch.randn(3, COLS), WEIGHT))
    residual = torch.randn(3, COLS) if adds else None

    def differentiable():
        if residual is None:
            return fusednorm.layer_norm(x, weight, BIAS)
        return fusednorm.add_layer_norm(x, residual, weight, BIAS)

    assert not replaying.is_repeated(differentiable)
    call(x.detach(), residual=residual, stats=gradients)
    assert replaying.is_repeated(differentiable)
    with Dispatched() as seen:
        assert not replaying.is_repeated(differentiable)
    assert seen.names == ["fusednorm::layer_norm"]
    result = differentiable()
    for tensor in (result,) if residual is None else result:
        assert tensor.requires_grad == gradients
    assert not replaying.is_repeated(lambda: fusednorm.layer_norm(x, weight, BIAS, dropout=0.5, seed=1))


def test_a_call_on_another_device_than_the_current_one_is_launched_there(replaying, monkeypatch):
    call()
    current = [3]

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.before, current[0] = current[0], self.device

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(replay_cache, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    assert replaying.is_repeated(call)
    assert current == [3]


def test_nothing_is_repeated_under_the_interpreter(monkeypatch):
    if not prepared_kernels.INTERPRETED:
        pytest.skip("kernels are compiled here")
    planned = []

    def plan(*arguments, **options):
        planned.append(choices.plan_forward(*arguments, **options))
        return planned[-1]

    monkeypatch.setattr(layer_norm_passes, "plan_forward", plan)
    for _ in range(2):
        assert isinstance(call(), Forward)
    assert len(planned) == 2
    assert not replay_cache._KNOWN
