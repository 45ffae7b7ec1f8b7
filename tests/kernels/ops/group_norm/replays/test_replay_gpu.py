"""Repeated calls of GroupNorm on a GPU: the bits of the first, on any stream, in a graph, on any device."""

import fusednorm
import fusednorm.api.group_norm as ours
import pytest
import torch
from fusednorm.launch import replay_cache

from tests.kernels.harness.on_gpu import on_streams_of_their_own, watched
from tests.kernels.ops.group_norm.cases import make_case

pytestmark = pytest.mark.gpu

# One program a group, programs that share one, samples that are streamed, and parameters reduced in two steps.
SHAPES = [
    ((2, 64, 8, 8), 8),
    ((2, 320, 64, 64), 32),
    ((2, 960, 128, 128), 32),
    ((3, 96, 37, 41), 32),
    ((3000, 32, 8, 8), 4),
    ((5, 1280), 32),
    ((4, 512, 14, 14), 32),
]

# By layout, a sample whose programs wait for one another; backward at least.
WAITING = {False: (640, 32, 32), True: (512, 14, 14)}


class Call:
    """Both passes over the same operands; `given` says what comes."""

    def __init__(self, shape, groups, device, last, dtype=torch.bfloat16, of_samples=False, **given):
        last = last and len(shape) > 2
        self.case = make_case(shape, groups, dtype, device, last, activation="silu", **given)
        self.dy = torch.randn_like(self.case.x)
        halves = torch.randn(shape[0], 2 * shape[1], device=device).to(dtype).chunk(2, dim=1)
        self.of_samples = dict(zip(("scale", "shift"), halves, strict=True)) if of_samples else {}

    def both(self, saved=True):
        """Results of forward, and of backward, given the statistics or taking them anew."""
        forward = self.case.forward(ours, stats=True, **self.of_samples)
        statistics = {"mean": forward.mean, "rstd": forward.rstd} if saved else {}
        return *forward, *self.case.backward(ours, self.dy, **statistics, **self.of_samples)


def no_plan(*_, **__):
    raise AssertionError("planned anew")


@pytest.fixture
def forbid_plans(monkeypatch):
    def forbid():
        for pass_ in ("forward", "backward"):
            monkeypatch.setattr(ours, f"plan_{pass_}", no_plan)

    return forbid


def assert_same(results, wanted):
    for result, other in zip(results, wanted, strict=True):
        assert result is other is None or (torch.equal(result, other) and result.stride() == other.stride())


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("given", [{}, {"residual": True, "of_samples": True}, {"affine": False}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_repeated_calls_give_the_bits_of_the_first(
    shape, groups, last, dtype, given, saved, device, poisoned, forbid_plans
):
    first, second = (Call(shape, groups, device, last, dtype, **given) for _ in range(2))
    planned = []
    for call in (first, second):
        replay_cache.clear_replays()
        planned.append(call.both(saved))
    forbid_plans()
    for _ in range(2):
        for call, wanted in zip((first, second), planned, strict=True):
            assert_same(call.both(saved), wanted)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("last", [False, True])
def test_two_streams_at_once(last, waits, device, forbid_plans, monkeypatch):
    monkeypatch.setattr("fusednorm.policy.cooperative_launches._allowed", waits)
    calls = [Call((16, *WAITING[last]), 32, device, last, of_samples=True) for _ in range(2)]
    expected = [call.both() for call in calls]
    forbid_plans()
    for results in on_streams_of_their_own([call.both for call in calls], device):
        for result, wanted in zip(results, expected, strict=True):
            assert_same(result, wanted)


@pytest.mark.parametrize(("shape", "groups"), SHAPES)
@pytest.mark.parametrize("last", [False, True])
def test_repeated_calls_are_captured_into_a_graph(last, shape, groups, device, forbid_plans):
    call = Call(shape, groups, device, last, of_samples=True)
    call.both()
    forbid_plans()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.both()
    for _ in range(3):
        call.case.x.copy_(torch.randn_like(call.case.x))
        call.dy.copy_(torch.randn_like(call.dy))
        graph.replay()
        assert_same(captured, call.both())


@pytest.mark.parametrize("last", [False, True])
def test_a_kind_first_seen_in_a_capture_is_right_outside_of_it(last, device, forbid_plans):
    call = Call((2, *WAITING[last]), 32, device, last)
    wanted = call.both()
    replay_cache.clear_replays()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.both()
    forbid_plans()
    assert_same(call.both(), wanted)
    graph.replay()
    assert_same(captured, wanted)


@pytest.mark.parametrize("last", [False, True])
def test_a_repeated_call_allocates_its_results_and_one_workspace(last, device):
    call = Call((2, 320, 64, 64), 32, device, last, of_samples=True)
    results = [call.both() for _ in range(2)]

    def allocations():
        return torch.cuda.memory_stats(device)["allocation.all.allocated"]

    before = allocations()
    results.append(call.both())
    made = len({id(result) for result in results[-1] if result is not None})
    assert made <= allocations() - before <= made + 2


def test_a_differentiable_call_is_repeated_in_both_passes(device, forbid_plans):
    x = torch.randn(2, 320, 32, 32, device=device, requires_grad=True)
    weight, bias = (torch.randn(320, device=device, requires_grad=True) for _ in range(2))
    dy = torch.randn_like(x)

    def gradients():
        y = fusednorm.group_norm(x, 32, weight, bias, activation="silu")
        return y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)

    first = gradients()
    forbid_plans()
    assert_same(gradients(), first)


def test_known_launches_go_straight_to_the_driver(device):
    Call((2, 320, 64, 64), 32, device, True).both()
    starts = [start for known in replay_cache._KNOWN.values() for start in known.template.launches]
    assert len(starts) > 2
    for start in starts:
        assert start.kernel.launcher.function is start.kernel.compiled_kernel.run.launch


def test_hooks_see_every_launch(device):
    call = Call((2, 320, 64, 64), 32, device, True)
    wanted = call.both()
    launches = sum(len(known.template.launches) for known in replay_cache._KNOWN.values())
    with watched() as seen:
        assert_same(call.both(), wanted)
    assert len(seen) == launches
    assert_same(call.both(), wanted)
    assert len(seen) == launches


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("last", [False, True])
def test_each_tensor_is_computed_where_it_is(last):
    calls = [Call((2, *WAITING[last]), 32, torch.device("cuda", index), last) for index in range(2)]
    wanted = [call.both() for call in calls]
    for _ in range(3):
        for call, results in zip(calls, wanted, strict=True):
            assert_same(call.both(), results)
            assert torch.cuda.current_device() == 0
