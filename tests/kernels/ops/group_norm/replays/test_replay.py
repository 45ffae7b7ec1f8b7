"""Which calls of GroupNorm are launched again without checks and plan, and that these are the planned launches.

The driver takes notes and, where asked, has the interpreter run what it is given: addresses and values.
"""

from itertools import product

import fusednorm
import pytest
import torch
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.launch import replay_cache
from fusednorm.ops.group_norm.channels_last.backward.cooperative import BackwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.contiguous.backward.cooperative import GroupNormBackwardCooperative
from fusednorm.ops.group_norm.contiguous.forward.cooperative import GroupNormForwardCooperative
from fusednorm.results import Forward

from tests.kernels.launch.replaying import addresses, compare, flat, note_workspaces
from tests.kernels.ops.group_norm.cases import CHANNELS_LAST, CONTIGUOUS, channels_last, use_configuration
from tests.kernels.ops.group_norm.replays.operands import GROUPS, PASSES, SHAPE, C, N, Operands, call
from tests.sampling import mark_rest_slow

# Its driver stands in for one that is absent; test_replay_gpu.py has the real one.
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")


GIVEN = {
    "plain": {},
    "everything": {"residual": True, "scale": True, "outside": True},
    "statistics taken anew": {"saved": False, "dtype": torch.bfloat16},
    "no parameters": {"affine": False},
    "companions of the other format": {"residual": True, "outside": True, "odd": True, "dtype": torch.bfloat16},
    "scale alone": {"affine": False, "scale": True, "dtype": torch.float16},
}
OPTIONS = {"eps": 1e-3, "activation": "silu", "stats": True}


def equal(results, wanted):
    for result, other in zip(results, wanted, strict=True):
        assert result is other is None or (torch.equal(result, other) and result.stride() == other.stride())


BITS = (
    ("forward", "everything"),
    ("backward", "everything"),
    ("backward", "statistics taken anew"),
    ("forward", "companions of the other format"),
    ("backward", "companions of the other format"),
)


@pytest.mark.parametrize(
    ("algorithm", "of"), mark_rest_slow(product((*CONTIGUOUS, *CHANNELS_LAST), BITS), together=1)
)
def test_a_repeated_call_gives_the_bits_of_a_planned_one(algorithm, of, replaying, poisoned, monkeypatch):
    pass_, given = of
    last = use_configuration(monkeypatch, algorithm)
    first, second = (Operands(last, (2, 8, 5, 7), 2, **GIVEN[given]) for _ in range(2))
    planned = second.call(pass_, **OPTIONS)
    replay_cache.clear_replays()
    first.call(pass_, **OPTIONS)
    replaying.runs = True
    assert replaying.is_repeated(lambda: equal(second.call(pass_, **OPTIONS), planned))


COOPERATIVE = {
    "cooperative": (
        False,
        GroupNormForwardCooperative(2, 1, 2, 1, 1),
        GroupNormBackwardCooperative(2, 1, 1, 1, 4, 1, 0),
    ),
    "shared blocks": (
        True,
        ForwardCooperativeBlock(2, 2, 1, 4, 1, 1),
        BackwardCooperativeBlock(16, 1, 2, 1, 4, 2, 0),
    ),
}


def use(monkeypatch, name):
    """An algorithm of those that never wait, of those that do, or the one that is chosen."""
    if name not in COOPERATIVE:
        return use_configuration(monkeypatch, name)
    last, forward, backward = COOPERATIVE[name]
    monkeypatch.setattr("fusednorm.ops.group_norm.forward_choice.list_candidates", lambda *_: (forward,))
    monkeypatch.setattr("fusednorm.ops.group_norm.backward_choice.choose_backward", lambda *_: backward)
    return last


CASES = [
    *(((2, 16, 8, 16), 4, given) for given in GIVEN),
    ((3000, 16, 4, 4), 4, "everything"),  # gradients of parameters reduced in two steps
    ((1, 24, 5, 7), 3, "everything"),  # parts of a workspace that start between multiples of 16 bytes
]


LAUNCHED = product((*CONTIGUOUS, *CHANNELS_LAST, *COOPERATIVE), PASSES, CASES)


@pytest.mark.parametrize(
    ("algorithm", "pass_", "shape", "groups", "given"),
    mark_rest_slow((name, pass_, *case) for name, pass_, case in LAUNCHED),
)
def test_repeated_launches_are_the_planned_ones(
    algorithm, pass_, shape, groups, given, replaying, plans, monkeypatch
):
    workspaces = note_workspaces(monkeypatch)
    last = use(monkeypatch, algorithm)
    first, second = (Operands(last, shape, groups, **GIVEN[given]) for _ in range(2))
    first.call(pass_, **OPTIONS)
    result = second.call(pass_, **OPTIONS)
    replay_cache.clear_replays()
    second.call(pass_, **OPTIONS, out=result)
    _, plan = plans
    tensors = (second.x, second.dy, *second.affine, *second.options.values(), *second.gradients.values(), *result)
    compare(replaying.launched, plan, addresses(*tensors), workspaces)
    if groups != 3:  # Those of which there are three do not fit the configurations that share.
        assert bool(workspaces) == (algorithm in COOPERATIVE)


@pytest.mark.parametrize("pass_", PASSES)
def test_a_repeated_call_is_planned_once(pass_, replaying, plans):
    operands = Operands()
    for _ in range(3):
        operands.call(pass_)
    assert len(plans) == 1
    assert len(replaying.launched) == 2 * len(plans[0])


@pytest.mark.parametrize(
    ("pass_", "last", "shape", "out_dtype"),
    mark_rest_slow(
        product(
            PASSES,
            [False, True],
            [SHAPE, (N, C), (1, C, 3), (N, C, 1, 1), (1, C, 2, 3, 4)],
            [None, torch.float32, torch.bfloat16],
        )
    ),
)
def test_a_repeated_call_allocates_what_a_planned_one_does(pass_, last, shape, out_dtype, replaying, plans):
    def facts(result):
        return [t if t is None else (t.shape, t.stride(), t.dtype) for t in result]

    operands = Operands(last and len(shape) > 2, shape, dtype=torch.float16, scale=True, residual=True)
    planned = facts(operands.call(pass_, stats=True, out_dtype=out_dtype))
    assert replaying.is_repeated(lambda: operands.call(pass_, stats=True, out_dtype=out_dtype))
    assert facts(operands.call(pass_, stats=True, out_dtype=out_dtype)) == planned


@pytest.mark.parametrize("pass_", PASSES)
def test_a_call_has_one_workspace(pass_, replaying, plans, monkeypatch):
    last = use_configuration(monkeypatch, "stream")
    operands = Operands(last, scale=True, saved=False)
    operands.call(pass_, **OPTIONS)
    (known,) = replay_cache._KNOWN.values()
    workspaces = {t.untyped_storage().data_ptr() for launch in plans[0] for t in flat(launch.arguments) if own(t)}
    assert len(workspaces) > 1
    made = []
    new_empty = torch.Tensor.new_empty

    def noted(tensor, *size, **options):
        made.append(new_empty(tensor, *size, **options))
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", noted)
    result = operands.call(pass_, **OPTIONS)
    (workspace,) = [t for t in made if not any(t is r for r in result)]
    assert workspace.numel() == known.template.scratch_words
    start = workspace.data_ptr()
    assert all(offset < 4 * known.template.scratch_words for offset in known.template.scratch_offsets)
    assert {start + offset for offset in known.template.scratch_offsets} <= set(replaying.values)


def own(argument):
    return isinstance(argument, torch.Tensor) and argument.dtype == torch.float32


@pytest.mark.parametrize("pass_", PASSES)
def test_parameters_come_one_by_one_where_the_launcher_wants_them_so(pass_, replaying, plans):
    operands = Operands(scale=True)
    operands.call(pass_)
    results = [operands.call(pass_)]
    replaying.packed = False
    replay_cache.clear_replays()
    operands.call(pass_)
    results.append(operands.call(pass_))
    half = len(replaying.launched) // 2
    packed, one_by_one = ([again.parameters for again in replaying.launched[i:][:half]] for i in (0, half))
    assert [len(parameters) for parameters in packed] == [len(parameters) for parameters in one_by_one]
    assert packed[0][0] == one_by_one[0][0] == (operands.x if pass_ == "forward" else operands.dy).data_ptr()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pass_", PASSES)
def test_results_are_repeated_where_the_caller_wants_them(pass_, last, replaying, plans):
    operands = Operands(last, scale=True, residual=True)
    first = operands.call(pass_, stats=True)
    places = [None if result is None else torch.empty_like(result) for result in first]
    if pass_ == "backward":
        places[3] = None
    out = type(first)(*places)
    replaying.launched.clear()
    got = operands.call(pass_, stats=True, out=out)
    assert replaying.launched
    for result, place in zip(got, out, strict=True):
        assert place is None or result is place
        assert place is None or place.data_ptr() in replaying.values
    if pass_ == "backward":
        assert got.dresidual is out.dx
    some = operands.call(pass_, stats=True, out=type(first)(places[0]))
    assert some[0] is places[0]
    assert [result is None for result in some] == [result is None for result in first]


@pytest.mark.parametrize(
    "out",
    [
        Forward(torch.empty(3, *SHAPE[1:])),
        Forward(torch.empty(SHAPE).half()),
        Forward(channels_last(torch.empty(SHAPE))),
        Forward(torch._neg_view(torch.empty(SHAPE))),
        Forward(torch.empty(SHAPE), mean=torch.empty(N, GROUPS)),
        Forward(torch.empty(SHAPE), y_scale=torch.empty(N)),
    ],
)
def test_place_that_does_not_fit_is_not_repeated_but_refused(out, replaying, plans):
    call()
    with pytest.raises(fusednorm.KernelInputError, match=r"out\."):
        call(out=out)
    assert not replaying.launched


def test_misaligned_place_is_planned(replaying, plans):
    call()
    assert not replaying.is_repeated(lambda: call(out=Forward(torch.empty(N * C * 64 + 1)[1:].view(SHAPE))))
