"""Which calls of GroupNorm are launched again without checks and plan, with a driver that only takes notes."""

import fusednorm
import pytest
import torch
from fusednorm.api import autograd
from fusednorm.api import group_norm as group_norm_passes
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.launch import prepared_kernels, replay_cache
from fusednorm.policy import batch_invariance, cooperative_launches
from fusednorm.results import Backward, Forward
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.api.norm_calls import Dispatched
from tests.kernels.ops.group_norm.cases import channels_last
from tests.kernels.ops.group_norm.replays.operands import GROUPS, PASSES, SHAPE, C, N, call

# Its driver stands in for one that is absent; test_replay_gpu.py has the real one.
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")


def far_apart(*shape):
    """Samples whose channels lie in a tensor of twice as many."""
    return torch.randn(shape[0], 2 * shape[1])[:, : shape[1]]


CHANGES = {
    "samples": {"x": torch.randn(3, *SHAPE[1:])},
    "channels": {"x": torch.randn(N, 8, 8, 8), "weight": torch.randn(8), "bias": torch.randn(8)},
    "positions": {"x": torch.randn(N, C, 8, 9)},
    "axes": {"x": torch.randn(N, C, 64)},
    "layout": {"x": channels_last(torch.randn(SHAPE))},
    "dtype": {"x": torch.randn(SHAPE).half()},
    "groups": {"groups": 8},
    "weight": {"weight": None},
    "weight's dtype": {"weight": torch.randn(C).half()},
    "bias": {"bias": None},
    "bias's dtype": {"bias": torch.randn(C).bfloat16()},
    "eps": {"eps": 1e-3},
    "activation": {"activation": "silu"},
    "negative slope": {"activation": "leaky_relu", "negative_slope": 0.25},
    "residual": {"residual": torch.randn(SHAPE)},
    "the residual's dtype": {"residual": torch.randn(SHAPE).half()},
    "the residual's layout": {"residual": channels_last(torch.randn(SHAPE))},
    "scale": {"scale": torch.randn(N, C)},
    "scale's stride": {"scale": far_apart(N, C)},
    "shift": {"shift": torch.randn(N, C)},
    "both": {"scale": torch.randn(N, C), "shift": torch.randn(N, C)},
}
FORWARD_CHANGES = {"y's dtype": {"out_dtype": torch.float16}, "statistics": {"stats": True}}
BACKWARD_CHANGES = {
    "saved statistics": {"mean": torch.randn(N, GROUPS), "rstd": torch.rand(N, GROUPS)},
    "dy's dtype": {"dy": torch.randn(SHAPE).bfloat16()},
    "dy's layout": {"dy": channels_last(torch.randn(SHAPE))},
    "an outside gradient": {"dresidual_out": torch.randn(SHAPE)},
}


@pytest.mark.parametrize(
    ("pass_", "changed"),
    [
        *(("forward", change) for change in (CHANGES | FORWARD_CHANGES).values()),
        *(("backward", change) for change in (CHANGES | BACKWARD_CHANGES).values()),
    ],
    ids=[*CHANGES, *FORWARD_CHANGES, *CHANGES, *BACKWARD_CHANGES],
)
def test_whatever_decides_a_launch_tells_calls_apart(pass_, changed, replaying, plans):
    call(pass_)
    assert not replaying.is_repeated(lambda: call(pass_, **changed))
    assert replaying.is_repeated(lambda: call(pass_, **changed))
    assert replaying.is_repeated(lambda: call(pass_))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"bias": None}, {"weight": None}),
        ({"scale": torch.randn(N, C)}, {"shift": torch.randn(N, C)}),
    ],
    ids=["weight or bias", "scale or shift"],
)
@pytest.mark.parametrize("pass_", PASSES)
def test_which_of_two_like_tensors_came_tells_calls_apart(pass_, one, other, replaying, plans):
    call(pass_, **one)
    assert not replaying.is_repeated(lambda: call(pass_, **other))
    assert replaying.is_repeated(lambda: call(pass_, **one))


def test_whether_programs_may_wait_tells_calls_apart(replaying, plans, monkeypatch):
    monkeypatch.setattr(cooperative_launches, "INTERPRETED", False)
    monkeypatch.setattr(cooperative_launches, "_allowed", True)
    call()
    fusednorm.allow_waiting(False)
    assert not replaying.is_repeated(call)
    assert replaying.is_repeated(call)


def test_whether_samples_are_cut_as_if_alone_tells_calls_apart(replaying, plans, monkeypatch):
    monkeypatch.setattr(batch_invariance, "_required", False)
    call()
    fusednorm.require_batch_invariance(True)
    assert not replaying.is_repeated(call)
    assert replaying.is_repeated(call)


def test_passes_are_told_apart(replaying, plans):
    call("forward")
    assert not replaying.is_repeated(lambda: call("backward"))


MISALIGNED = torch.randn(N * C * 64 + 1)[1:].view(SHAPE)
SAME = torch.randn(C)
NEVER = {
    "dropout": {"dropout": 0.5, "seed": 1},
    "a seed": {"seed": 1},
    "no samples": {"x": torch.randn(0, *SHAPE[1:])},
    "misaligned x": {"x": MISALIGNED},
    "misaligned weight": {"weight": torch.randn(C + 1)[1:]},
    "misaligned residual": {"residual": MISALIGNED},
    "misaligned shift": {"shift": torch.randn(N, C + 1)[:, 1:]},
}


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("what", NEVER)
def test_calls_that_follow_no_recipe_are_planned_each_time(what, pass_, replaying, plans):
    call(pass_)
    call(pass_, residual=torch.randn(SHAPE))
    call(pass_, shift=far_apart(N, C))
    for _ in range(2):
        assert not replaying.is_repeated(lambda: call(pass_, **NEVER[what]))


def test_gradients_of_no_samples_are_zero_every_time(replaying):
    for _ in range(2):
        result = call("backward", x=torch.randn(0, *SHAPE[1:]))
        assert not result.dweight.any()
        assert not result.dbias.any()


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("what", [what for what in NEVER if "misaligned" in what])
def test_misaligned_tensors_teach_nothing_about_aligned_ones(what, pass_, replaying, plans):
    call(pass_, **NEVER[what])
    aligned = {name: torch.empty_strided(t.shape, t.stride()).copy_(t) for name, t in NEVER[what].items()}
    assert not replaying.is_repeated(lambda: call(pass_, **aligned))
    assert replaying.is_repeated(lambda: call(pass_, **aligned))


@pytest.mark.parametrize("pass_", PASSES)
def test_one_tensor_in_two_places_teaches_which_place_is_which(pass_, replaying, plans):
    weight, bias = torch.randn(C), torch.randn(C)
    call(pass_, weight=weight, bias=weight, activation="silu")
    for first, second in ((weight, bias), (bias, weight), (weight, weight)):
        replaying.launched.clear()
        call(pass_, weight=first, bias=second, activation="silu")
        affine = [value for value in replaying.values if value in (weight.data_ptr(), bias.data_ptr())]
        assert affine == [first.data_ptr(), second.data_ptr()]


@pytest.mark.parametrize("pass_", PASSES)
def test_a_result_in_the_place_of_an_input_is_no_longer_there_in_a_later_call(pass_, replaying, plans):
    x = torch.randn(SHAPE)
    out = Forward(x) if pass_ == "forward" else Backward(x)
    call(pass_, x=x, out=out)
    result = call(pass_, x=x)[0]
    assert result is not x
    assert {x.data_ptr(), result.data_ptr()} <= set(replaying.values)


WRONG = {
    "weight's length": {"weight": torch.randn(8)},
    "weight's dtype": {"weight": torch.randn(C).double()},
    "weight's stride": {"weight": torch.randn(2 * C)[::2]},
    "x's dtype": {"x": torch.randn(SHAPE).double()},
    "x's stride": {"x": torch.randn(SHAPE).transpose(2, 3)},
    "x's axes": {"x": torch.randn(C)},
    "x's sign": {"x": torch._neg_view(torch.randn(SHAPE))},
    "groups": {"groups": 3},
    "the residual's samples": {"residual": torch.randn(3, *SHAPE[1:])},
    "the residual's stride": {"residual": torch.randn(SHAPE).transpose(2, 3)},
    "scale's stride": {"scale": torch.randn(C, N).T},
    "eps": {"eps": -1.0},
    "activation": {"activation": "tanh"},
    "an activation without a hash": {"activation": ["silu"]},
    "dropout": {"dropout": 1.0, "seed": 1},
    "the seed": {"seed": 2**63},
}
FORWARD_WRONG = {"y's dtype": {"out_dtype": torch.int8}}
BACKWARD_WRONG = {
    "one statistic": {"mean": torch.randn(N, GROUPS)},
    "statistics' shape": {"mean": torch.randn(GROUPS, N), "rstd": torch.randn(GROUPS, N)},
    "dy's stride": {"dy": torch.randn(SHAPE).transpose(2, 3)},
}


@pytest.mark.parametrize(
    ("pass_", "wrong"),
    [
        *(("forward", wrong) for wrong in (WRONG | FORWARD_WRONG).values()),
        *(("backward", wrong) for wrong in (WRONG | BACKWARD_WRONG).values()),
    ],
    ids=[*WRONG, *FORWARD_WRONG, *WRONG, *BACKWARD_WRONG],
)
def test_wrong_calls_are_refused_after_right_ones(pass_, wrong, replaying, plans):
    call(pass_)
    for change in CHANGES.values():
        call(pass_, **change)
    replaying.launched.clear()
    for _ in range(2):
        with pytest.raises((fusednorm.KernelInputError, fusednorm.UnsupportedShapeError)):
            call(pass_, **wrong)
    assert not replaying.launched


@pytest.mark.parametrize("pass_", PASSES)
def test_kinds_are_bounded_and_the_oldest_goes(pass_, replaying, plans, monkeypatch):
    monkeypatch.setattr(replay_cache, "MAX_KINDS", 3)
    for eps in (1.0, 2.0, 3.0, 4.0):
        call(pass_, eps=eps)
    assert len(replay_cache._KNOWN) == 3
    assert replaying.is_repeated(lambda: call(pass_, eps=4.0))
    assert not replaying.is_repeated(lambda: call(pass_, eps=1.0))


@pytest.mark.parametrize("pass_", PASSES)
def test_a_watched_call_is_planned(pass_, replaying, plans, monkeypatch):
    call(pass_)
    monkeypatch.setattr(prepared_kernels, "can_bypass_triton", lambda: False)
    assert not replaying.is_repeated(lambda: call(pass_))


@pytest.mark.parametrize("pass_", PASSES)
def test_a_kernel_that_is_still_being_compiled_is_not_kept(pass_, replaying, plans, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(prepared_kernels, "find_prepared", lambda *_: None)
        call(pass_)
    assert not replaying.is_repeated(lambda: call(pass_))
    assert replaying.is_repeated(lambda: call(pass_))


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("adds", [False, True])
def test_a_differentiable_call_of_a_known_kind_is_repeated_unless_it_is_watched(
    adds, gradients, replaying, plans, monkeypatch
):
    # Torch's own norms, which CPU tensors take, are no replays.
    monkeypatch.setattr(autograd, "select_library", lambda op, x: fusednorm.reference)
    x, weight = (torch.randn(size, requires_grad=gradients) for size in (SHAPE, C))
    bias, residual = torch.randn(C), torch.randn(SHAPE) if adds else None

    def differentiable(**options):
        if residual is None:
            return fusednorm.group_norm(x, GROUPS, weight, bias, **options)
        return fusednorm.add_group_norm(x, residual, GROUPS, weight, bias, **options)

    assert not replaying.is_repeated(differentiable)
    call(residual=residual, stats=gradients)
    assert replaying.is_repeated(differentiable)
    with Dispatched() as seen:
        assert not replaying.is_repeated(differentiable)
    assert seen.names == ["fusednorm::group_norm"]
    result = differentiable()
    for tensor in (result,) if residual is None else result:
        assert tensor.requires_grad == gradients
    assert not replaying.is_repeated(lambda: differentiable(dropout=0.5, seed=1))


@pytest.mark.parametrize("pass_", PASSES)
def test_a_call_on_another_device_than_the_current_one_is_launched_there(pass_, replaying, plans, monkeypatch):
    call(pass_)
    current, entered = [3], []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)
            self.before, current[0] = current[0], self.device

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(replay_cache, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    assert replaying.is_repeated(lambda: call(pass_))
    assert (current, entered) == ([3], [-1])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory_are_not_launched_on(replaying, plans):
    call()
    with FakeTensorMode():
        x, weight, bias = torch.empty(SHAPE), torch.empty(C), torch.empty(C)
        inputs = x, None, weight, bias, None, None
        assert group_norm_passes.FORWARD.try_replay(inputs, (GROUPS, 1e-5, "none", None, False)) is None
    assert not replaying.launched


@pytest.mark.parametrize("pass_", PASSES)
def test_nothing_is_repeated_under_the_interpreter(pass_, monkeypatch):
    planned = []
    name = f"plan_{pass_}"
    plan = getattr(group_norm_passes, name)
    monkeypatch.setattr(group_norm_passes, name, lambda *a, **o: planned.append(plan(*a, **o)) or planned[-1])
    for _ in range(2):
        call(pass_)
    assert len(planned) == 2
    assert not replay_cache._KNOWN
