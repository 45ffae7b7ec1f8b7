"""Which calls of GroupNorm are launched again without checks and plan, and that these are the planned launches.

The driver takes notes and, where asked, has the interpreter run what it is given: addresses and values.
"""

import fusednorm
import pytest
import torch
from fusednorm.device import INTERPRETED
from fusednorm.launch import recipes
from fusednorm.launch import sample_replay as group_norm_repeat
from fusednorm.ops.group_norm.channels_last.backward.cooperative import BackwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.contiguous.backward.cooperative import BackwardCooperative
from fusednorm.ops.group_norm.contiguous.forward.cooperative import ForwardCooperative
from fusednorm.results import Forward

from tests.kernels.group_norm.cases import CHANNELS_LAST, CONTIGUOUS, channels_last, use_configuration
from tests.kernels.group_norm.repeating import GROUPS, PASSES, SHAPE, C, N, Operands, call, flat

# Its driver stands in for one that is absent; test_group_norm_repeat_gpu.py has the real one.
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")


GIVEN = {
    "plain": {},
    "everything": {"residual": True, "scale": True, "outside": True},
    "statistics taken anew": {"saved": False, "dtype": torch.bfloat16},
    "no parameters": {"affine": False},
    "scale alone": {"affine": False, "scale": True, "dtype": torch.float16},
}
OPTIONS = {"eps": 1e-3, "activation": "silu", "stats": True}


def equal(results, wanted):
    for result, other in zip(results, wanted, strict=True):
        assert result is other is None or (torch.equal(result, other) and result.stride() == other.stride())


@pytest.mark.parametrize(
    ("pass_", "given"),
    [("forward", "everything"), ("backward", "everything"), ("backward", "statistics taken anew")],
)
@pytest.mark.parametrize("algorithm", [*CONTIGUOUS, *CHANNELS_LAST])
def test_a_repeated_call_gives_the_bits_of_a_planned_one(algorithm, pass_, given, repeating, poisoned, monkeypatch):
    last = use_configuration(monkeypatch, algorithm)
    first, second = (Operands(last, (2, 8, 5, 7), 2, **GIVEN[given]) for _ in range(2))
    planned = second.call(pass_, **OPTIONS)
    group_norm_repeat._KNOWN.clear()
    first.call(pass_, **OPTIONS)
    repeating.runs = True
    assert repeating.is_repeated(lambda: equal(second.call(pass_, **OPTIONS), planned))


COOPERATIVE = {
    "cooperative": (False, ForwardCooperative(2, 1, 2, 1, 1), BackwardCooperative(2, 1, 1, 1, 4, 1, 0)),
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
    monkeypatch.setattr("fusednorm.ops.group_norm.forward_choice.candidates", lambda *_: (forward,))
    monkeypatch.setattr("fusednorm.ops.group_norm.backward_choice.choose_backward", lambda *_: backward)
    return last


def addresses(*tensors):
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


CASES = [
    *(((2, 16, 8, 16), 4, given) for given in GIVEN),
    ((3000, 16, 4, 4), 4, "everything"),  # gradients of parameters reduced in two steps
    ((1, 24, 5, 7), 3, "everything"),  # parts of a workspace that start between multiples of 16 bytes
]


@pytest.mark.parametrize(("shape", "groups", "given"), CASES)
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("algorithm", [*CONTIGUOUS, *CHANNELS_LAST, *COOPERATIVE])
def test_repeated_launches_are_the_planned_ones(
    algorithm, pass_, shape, groups, given, repeating, plans, monkeypatch
):
    mailboxes = []

    def mailbox(device, stream, words):
        assert (device.type, stream) == ("cpu", 69)
        mailboxes.append(torch.zeros(words, dtype=torch.int64))
        return mailboxes[-1]

    monkeypatch.setattr(recipes, "mailbox_again", mailbox)
    last = use(monkeypatch, algorithm)
    first, second = (Operands(last, shape, groups, **GIVEN[given]) for _ in range(2))
    first.call(pass_, **OPTIONS)
    result = second.call(pass_, **OPTIONS)
    group_norm_repeat._KNOWN.clear()
    second.call(pass_, **OPTIONS, out=result)
    _, plan = plans
    tensors = (second.x, second.dy, *second.affine, *second.options.values(), *second.gradients.values(), *result)
    compare(repeating.launched, plan, addresses(*tensors), mailboxes)
    if groups != 3:  # Those of which there are three do not fit the configurations that share.
        assert bool(mailboxes) == (algorithm in COOPERATIVE)


def compare(launched, plan, of_call, mailboxes):
    """What was launched against a plan of the same call, whose workspaces are other ones."""
    assert [again.kernel for again in launched] == [launch.kernel for launch in plan]
    moved = {}
    for again, launch in zip(launched, plan, strict=True):
        assert again.grid == (*launch.grid, 1, 1)[:3]
        assert again.stream == 69
        constants = [launch.options[name] for name in launch.kernel.arg_names[len(launch.arguments) :]]
        wanted = [*flat(launch.arguments), *constants]
        for value, argument in zip(flat(again.parameters), wanted, strict=True):
            if not isinstance(argument, torch.Tensor):
                assert type(value) is type(argument)
                assert value == argument
            elif argument.data_ptr() in of_call:
                assert value == argument.data_ptr()
            elif argument.dtype == torch.int64:
                assert [value, argument.numel()] in [[box.data_ptr(), box.numel()] for box in mailboxes]
            else:
                storage = argument.untyped_storage()
                start = value - (argument.data_ptr() - storage.data_ptr())
                assert moved.setdefault(storage.data_ptr(), (start, storage.nbytes()))[0] == start
    end = 0
    for start, nbytes in sorted(moved.values()):
        assert start >= end
        assert start % 16 == 0
        end = start + nbytes


@pytest.mark.parametrize("pass_", PASSES)
def test_a_repeated_call_is_planned_once(pass_, repeating, plans):
    operands = Operands()
    for _ in range(3):
        operands.call(pass_)
    assert len(plans) == 1
    assert len(repeating.launched) == 2 * len(plans[0])


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPE, (N, C), (1, C, 3), (N, C, 1, 1), (1, C, 2, 3, 4)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pass_", PASSES)
def test_a_repeated_call_allocates_what_a_planned_one_does(pass_, last, shape, out_dtype, repeating, plans):
    def facts(result):
        return [t if t is None else (t.shape, t.stride(), t.dtype) for t in result]

    operands = Operands(last and len(shape) > 2, shape, dtype=torch.float16, scale=True, residual=True)
    planned = facts(operands.call(pass_, stats=True, out_dtype=out_dtype))
    assert repeating.is_repeated(lambda: operands.call(pass_, stats=True, out_dtype=out_dtype))
    assert facts(operands.call(pass_, stats=True, out_dtype=out_dtype)) == planned


@pytest.mark.parametrize("pass_", PASSES)
def test_a_call_has_one_workspace(pass_, repeating, plans, monkeypatch):
    last = use_configuration(monkeypatch, "stream")
    operands = Operands(last, scale=True, saved=False)
    operands.call(pass_, **OPTIONS)
    (known,) = group_norm_repeat._KNOWN.values()
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
    assert workspace.numel() == known.recipe.words
    start = workspace.data_ptr()
    assert all(offset < 4 * known.recipe.words for offset in known.recipe.offsets)
    assert {start + offset for offset in known.recipe.offsets} <= set(repeating.values)


def own(argument):
    return isinstance(argument, torch.Tensor) and argument.dtype == torch.float32


@pytest.mark.parametrize("pass_", PASSES)
def test_parameters_come_one_by_one_where_the_launcher_wants_them_so(pass_, repeating, plans):
    operands = Operands(scale=True)
    operands.call(pass_)
    results = [operands.call(pass_)]
    repeating.packed = False
    group_norm_repeat._KNOWN.clear()
    operands.call(pass_)
    results.append(operands.call(pass_))
    half = len(repeating.launched) // 2
    packed, one_by_one = ([again.parameters for again in repeating.launched[i:][:half]] for i in (0, half))
    assert [len(parameters) for parameters in packed] == [len(parameters) for parameters in one_by_one]
    assert packed[0][0] == one_by_one[0][0] == (operands.x if pass_ == "forward" else operands.dy).data_ptr()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pass_", PASSES)
def test_results_are_repeated_where_the_caller_wants_them(pass_, last, repeating, plans):
    operands = Operands(last, scale=True, residual=True)
    first = operands.call(pass_, stats=True)
    places = [None if result is None else torch.empty_like(result) for result in first]
    if pass_ == "backward":
        places[3] = None
    out = type(first)(*places)
    repeating.launched.clear()
    got = operands.call(pass_, stats=True, out=out)
    assert repeating.launched
    for result, place in zip(got, out, strict=True):
        assert place is None or result is place
        assert place is None or place.data_ptr() in repeating.values
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
        Forward(torch.empty(SHAPE), scale=torch.empty(N)),
    ],
)
def test_place_that_does_not_fit_is_not_repeated_but_refused(out, repeating, plans):
    call()
    with pytest.raises(fusednorm.KernelInputError, match=r"out\."):
        call(out=out)
    assert not repeating.launched


def test_misaligned_place_is_planned(repeating, plans):
    call()
    assert not repeating.is_repeated(lambda: call(out=Forward(torch.empty(N * C * 64 + 1)[1:].view(SHAPE))))
