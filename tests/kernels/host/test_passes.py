"""Calls that the host extension repeats: the planned launches and bits, and no call beyond those."""

from itertools import product

import fusednorm
import pytest
import torch
from fusednorm.api import autograd
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.launch import extension_calls
from fusednorm.launch.extension_calls import configure_extension
from fusednorm.policy import batch_invariance, cooperative_launches
from fusednorm.results import Backward, Forward

from tests.kernels.launch.replaying import addresses, compare
from tests.kernels.ops.group_norm.replays import operands as samples
from tests.kernels.ops.group_norm.replays.test_kinds import BACKWARD_CHANGES, CHANGES, FORWARD_CHANGES
from tests.kernels.ops.layer_norm.replays import operands as rows
from tests.kernels.ops.layer_norm.replays.test_replay import planned_into
from tests.sampling import mark_rest_slow

# Its driver stands in for one that is absent; test_gpu.py has the real one.
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")

EVERYTHING = {"residual": True, "outside": True, "dtype": torch.bfloat16}


def of_rows(count, cols, **given):
    return rows.Operands(count, cols, **given)


def of_samples(pass_, last, **given):
    operands = samples.Operands(last, (2, 16, 5, 7), 4, **given)
    return lambda **more: operands.call(pass_, stats=True, **more)


def equal(results, wanted):
    for result, other in zip(results, wanted, strict=True):
        assert (result is None) == (other is None)
        if result is not None:
            assert torch.equal(result.float(), other.float())
            assert result.stride() == other.stride()


@pytest.mark.parametrize(
    ("waits", "cols", "pass_"), mark_rest_slow(product([False, True], [48, 1030, 20000], rows.PASSES))
)
def test_launches_over_rows_are_the_planned_ones(waits, cols, pass_, natively, plans, monkeypatch):
    monkeypatch.setattr(cooperative_launches, "INTERPRETED", not waits)
    of_rows(2, cols, **EVERYTHING).call(pass_)
    for count in (1, 5, 40):
        operands = of_rows(count, cols, **EVERYTHING)
        if cols == 20000:  # Some of these depend on the number of rows.
            operands.call(pass_)
        plans.clear()
        natively.launched.clear()
        result = operands.call(pass_)
        assert not plans
        result = result if isinstance(result, Forward | Backward) else Forward(*result)
        planned_into(result, lambda o=operands: o.call(pass_), monkeypatch)
        compare(natively.launched, *plans, addresses(*operands.tensors, *result), natively.workspaces)


def test_a_call_while_workspaces_are_made_is_another_call(natively, plans, monkeypatch):
    # As a finaliser may make, which Python runs whenever it likes.
    monkeypatch.setattr(cooperative_launches, "INTERPRETED", False)
    pass_, operands, others = "layer_norm_forward", of_rows(1, 40000), of_rows(5, 48)
    for each in (operands, others):
        each.call(pass_)
    made = extension_calls.get_or_allocate_stream_workspace

    def made_beside_a_call(*arguments):
        others.call(pass_)
        return made(*arguments)

    monkeypatch.setattr(extension_calls, "get_or_allocate_stream_workspace", made_beside_a_call)
    plans.clear()
    natively.launched.clear()
    result = operands.call(pass_)
    assert not plans
    planned_into(result, lambda: operands.call(pass_), monkeypatch)
    assert len(natively.launched) > len(plans[0])
    compare(
        natively.launched[-len(plans[0]) :],
        *plans,
        addresses(*operands.tensors, *result),
        natively.workspaces,
    )


@pytest.mark.parametrize("pass_", rows.PASSES)
@pytest.mark.parametrize("given", [{}, EVERYTHING, {"saved": False}, {"affine": False}, {"batch": 2}])
def test_calls_over_rows_give_the_bits_of_planned_ones(given, pass_, natively, host_extension, poisoned):
    first, second = (of_rows(count, 48, **given) for count in (3, 7))
    planned = second.call(pass_)
    host_extension.clear_replays()
    first.call(pass_)
    natively.runs = True
    assert natively.is_repeated(lambda: equal(second.call(pass_), planned))


@pytest.mark.parametrize(
    ("given", "last", "pass_"),
    mark_rest_slow(
        product(
            [{}, {"residual": True, "scale": True, "outside": True}, {"saved": False}],
            [False, True],
            samples.PASSES,
        )
    ),
)
def test_calls_over_samples_give_the_bits_of_planned_ones(given, last, pass_, natively, host_extension, poisoned):
    first, second = (of_samples(pass_, last, **given) for _ in range(2))
    planned = second()
    host_extension.clear_replays()
    first()
    natively.runs = True
    assert natively.is_repeated(lambda: equal(second(), planned))


@pytest.mark.parametrize(
    ("pass_", "changed"),
    [
        *(("forward", change) for change in (CHANGES | FORWARD_CHANGES).values()),
        *(("backward", change) for change in (CHANGES | BACKWARD_CHANGES).values()),
    ],
    ids=[*CHANGES, *FORWARD_CHANGES, *CHANGES, *BACKWARD_CHANGES],
)
def test_whatever_decides_a_launch_tells_calls_apart(pass_, changed, natively, plans):
    samples.call(pass_)
    assert not natively.is_repeated(lambda: samples.call(pass_, **changed))
    assert natively.is_repeated(lambda: samples.call(pass_, **changed))
    assert natively.is_repeated(lambda: samples.call(pass_))


def test_policies_tell_calls_apart(natively, host_extension, plans, monkeypatch):
    monkeypatch.setattr(cooperative_launches, "INTERPRETED", False)
    for module, name, values in (
        (cooperative_launches, "_allowed", (True, False)),
        (batch_invariance, "_required", (False, True)),
    ):
        host_extension.clear_replays()
        for value in values:
            monkeypatch.setattr(module, name, value)
            assert not natively.is_repeated(samples.call)
            assert natively.is_repeated(samples.call)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.randn(2 * 16 * 64 + 1)[1:].view(samples.SHAPE)},
        {"weight": torch.randn(17)[1:]},
        {"x": torch.randn(0, 16, 8, 8)},
        {"dropout": 0.5, "seed": 1},
        {"seed": 1},
    ],
)
@pytest.mark.parametrize("pass_", samples.PASSES)
def test_calls_that_follow_no_recipe_are_planned_each_time(changed, pass_, natively, plans):
    samples.call(pass_)
    for _ in range(2):
        assert not natively.is_repeated(lambda: samples.call(pass_, **changed))


def test_lazily_negated_views_and_wrong_tensors_are_refused_after_right_ones(natively, plans):
    samples.call()
    for x in (torch._neg_view(torch.randn(samples.SHAPE)), torch.randn(samples.SHAPE).double()):
        with pytest.raises(fusednorm.KernelInputError):
            samples.call(x=x)
    with pytest.raises(fusednorm.KernelInputError):
        samples.call(activation=["silu"])


@pytest.mark.parametrize("what", rows.WRONG_BACKWARD)
def test_wrong_statistics_and_gradients_are_refused_after_right_ones(what, natively, plans):
    rows.backward()
    rows.backward(dresidual_out=torch.randn(3, rows.COLS))
    with pytest.raises((fusednorm.KernelInputError, fusednorm.UnsupportedShapeError)):
        rows.backward(**rows.WRONG_BACKWARD[what])
    assert not natively.launched
    assert natively.is_repeated(rows.backward)


def test_kinds_are_bounded_and_the_oldest_goes(natively, plans, host_extension):
    configure_extension(host_extension, autograd._compute_gradients, 3, natively.launch)
    for eps in (1.0, 2.0, 3.0, 4.0):
        samples.call(eps=eps)
    assert host_extension.count_replays() == 3
    assert natively.is_repeated(lambda: samples.call(eps=4.0))
    assert not natively.is_repeated(lambda: samples.call(eps=1.0))


def test_results_that_the_caller_places_are_left_to_python(natively, plans):
    samples.call()
    assert not natively.is_repeated(lambda: samples.call(out=Forward(torch.empty(samples.SHAPE))))


def test_what_a_launch_raises_is_raised(natively, host_extension):
    samples.call()
    natively.launched.clear()

    def fail(*_):
        raise MemoryError("no launch")

    configure_extension(host_extension, autograd._compute_gradients, 10, fail)
    with pytest.raises(MemoryError, match="no launch"):
        samples.call()
