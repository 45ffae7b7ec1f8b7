"""Which calls of LayerNorm and RMSNorm are launched again without checks and plan, and that these are the planned
launches.

The driver takes notes and, where asked, has the interpreter run what it is given: addresses and values.
"""

from itertools import product

import fusednorm
import pytest
import torch
from fusednorm.api import chain as chain_pass
from fusednorm.api import layer_norm as layer_norm_passes
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.launch import replay_cache
from fusednorm.policy import cooperative_launches
from fusednorm.results import Backward, Forward

from tests.kernels.harness.compiled import compile_elsewhere
from tests.kernels.launch.replaying import addresses, compare, note_workspaces
from tests.kernels.ops.layer_norm.replays.operands import BIAS, COLS, PASSES, WEIGHT, Operands, call
from tests.sampling import mark_rest_slow

# Its driver stands in for one that is absent; test_launches_gpu.py has the real one.
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")

GIVEN = {
    "plain": {},
    "everything": {"residual": True, "outside": True, "dtype": torch.bfloat16},
    "statistics taken anew": {"saved": False, "dtype": torch.bfloat16},
    "no parameters": {"affine": False},
    "sequences": {"batch": 2, "residual": True},
}


def planned_into(result, call, monkeypatch):
    """Have a call planned, whatever is known, that writes to these results."""
    with monkeypatch.context() as patch:
        patch.setattr(replay_cache, "_KNOWN", {})
        patch.setattr(replay_cache, "_extension", None)
        for module in (layer_norm_passes, chain_pass):
            patch.setattr(module, "prepare_result_tensors", lambda *_: result)
        call()


LAUNCHED = [(cols, given) for cols in (COLS, 1024, 1030, 2048, 20000, 70000) for given in GIVEN]
# These are split as no shorter rows are; launches of the others are those of 70,000 columns.
LAUNCHED += [(600000, given) for given in ("plain", "no parameters", "sequences")]
# Rows that one program holds are launched alike whether programs may wait or not.
LAUNCHED = [(*each, waits) for each in LAUNCHED for waits in ((False, True) if each[0] >= 20000 else (True,))]


@pytest.mark.parametrize(
    ("cols", "given", "waits", "pass_"), mark_rest_slow((*each, pass_) for each in LAUNCHED for pass_ in PASSES)
)
def test_a_repeated_launch_is_the_planned_one(cols, waits, given, pass_, replaying, plans, monkeypatch):
    monkeypatch.setattr(cooperative_launches, "INTERPRETED", not waits)
    workspaces = note_workspaces(monkeypatch)
    sizes = (2, 1, 5, 700) if cols < 20000 else (2, 1, 3)
    Operands(sizes[0], cols, **GIVEN[given]).call(pass_)
    for rows in sizes:
        operands = Operands(rows, cols, **GIVEN[given])
        if cols >= 20000:  # Some of these depend on the number of rows.
            operands.call(pass_)
        plans.clear()
        replaying.launched.clear()
        result = operands.call(pass_)
        assert not plans
        result = result if isinstance(result, Forward | Backward) else Forward(*result)
        planned_into(result, lambda o=operands: o.call(pass_), monkeypatch)
        compare(replaying.launched, *plans, addresses(*operands.tensors, *result), workspaces)


def equal(results, wanted):
    for result, other in zip(results, wanted, strict=True):
        assert result is other is None or (
            torch.equal(result.view(torch.uint8), other.view(torch.uint8)) and result.stride() == other.stride()
        )


@pytest.mark.parametrize(
    ("size", "given", "pass_"), mark_rest_slow(product([(COLS, 1), (COLS, 2), (COLS, 7), (1030, 2)], GIVEN, PASSES))
)
def test_a_repeated_call_gives_the_bits_of_a_planned_one(size, given, pass_, replaying, poisoned):
    cols, rows = size
    first, second = (Operands(count, cols, **GIVEN[given]) for count in (3, rows))
    planned = second.call(pass_)
    replay_cache.clear_replays()
    first.call(pass_)
    replaying.runs = True
    assert replaying.is_repeated(lambda: equal(second.call(pass_), planned))


@pytest.mark.parametrize("pass_", ["layer_norm_forward", "rms_norm_backward"])
def test_heads_with_parameters_of_their_own_are_repeated_for_as_many_tokens(pass_, replaying, poisoned):
    tokens = [Operands(size, COLS, heads=2) for size in (3, 3, 4)]
    planned = []
    for operands in tokens:
        replay_cache.clear_replays()
        planned.append(operands.call(pass_))
    replay_cache.clear_replays()
    tokens[0].call(pass_)
    replaying.runs = True
    assert replaying.is_repeated(lambda: equal(tokens[1].call(pass_), planned[1]))
    assert not replaying.is_repeated(lambda: equal(tokens[2].call(pass_), planned[2]))
    assert replaying.is_repeated(lambda: equal(tokens[2].call(pass_), planned[2]))


def test_tokens_whose_rows_lie_apart_are_told_by_their_shape(replaying, poisoned):
    # Strides alone do not say how many rows a token has, and so not whether the next token's rows follow.
    wide = torch.randn(4, 6, 2 * COLS)
    whole, part = wide[:, :, :COLS], wide[:, :3, :COLS]
    planned = call(whole)
    replaying.runs = True
    assert replaying.is_repeated(lambda: equal(call(whole), planned))
    for _ in range(2):
        with pytest.raises(fusednorm.UnsupportedShapeError):
            call(part)


def test_the_stride_of_a_single_row_is_not_taken_for_that_of_many(replaying):
    wide = torch.randn(5, 2 * COLS)
    call(wide[:1, :COLS])
    assert not replaying.is_repeated(lambda: call(wide[:, :COLS]))
    assert replaying.is_repeated(lambda: call(wide[:, :COLS]))
    assert replaying.is_repeated(lambda: call(wide[:1, :COLS]))
    # After grid, stream, head, tensors, scales, samples, rows ahead and rows: columns and the stride of x.
    many, single = (again.parameters[16:18] for again in replaying.launched)
    assert many == (single[0], 2 * single[1])


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_a_repeated_call_allocates_what_a_planned_one_does(out_dtype, stats, replaying):
    def facts(result):
        return [t if t is None else (t.shape, t.stride(), t.dtype, t.is_contiguous()) for t in result]

    wide = torch.randn(2, 5, 2 * COLS)
    for x in (wide[0, :, :COLS], wide[:1, 0, :COLS], wide[..., :COLS].contiguous(), wide[0, 0, :COLS]):
        stream = torch.randn(x.shape).half()
        options = {"residual": stream, "out_dtype": out_dtype, "stats": stats}
        planned = facts(call(x, **options))
        before = len(replaying.launched)
        assert facts(call(x, **options)) == planned
        assert len(replaying.launched) == before + 1


ROWS = """
import json
import torch
from fusednorm.arguments.arrays import Array
from fusednorm.arguments.options import NormOptions
from fusednorm.launch import prepared_kernels
from fusednorm.ops.layer_norm import config_tables as tables
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.choices import plan_backward, plan_forward
from fusednorm.results import Backward, Forward
from tests.kernels.harness.arrays import make

def plan(rows, cols, dtype, residual, stats):
    x, y = (torch.empty(rows, cols, dtype=dtype, device="meta") for _ in range(2))
    w, s = torch.empty(cols, device="meta"), torch.empty(rows, device="meta")
    mean, rstd, residual = s if stats else None, s if stats else None, x if residual else None
    out, gradients = Forward(y, mean, rstd, residual), Backward(x, w, w, residual)
    given = dict(x=x, weight=w, bias=w, residual=residual, options=NormOptions("layer_norm"))
    yield from plan_forward(make(LayerNormForwardCall, **given, out=out))
    yield from plan_backward(make(LayerNormBackwardCall, dy=x, **given, mean=mean, rstd=rstd, out=gradients))

shapes, wrong = 0, []
for itemsize, dtype in ((2, torch.bfloat16), (4, torch.float32)):
    lengths = [min(limit, 50257) for limit, _ in (*tables.FORWARD[itemsize], *tables.BACKWARD[itemsize])]
    for cols in sorted({cols - less for cols in lengths for less in (0, 3)}):
        for residual, stats in ((False, False), (False, True), (True, True)):
            shapes += 1
            keys, fixed = set(), set()
            for rows in (1, 2, 131, 133, 10**6):
                launches = list(plan(rows, cols, dtype, residual, stats))
                keys.add(tuple(prepared_kernels._make_key(l, 0)[0] for l in launches))
                for number, launch in enumerate(launches):
                    rule = launch.row_dependence
                    if rule is None:
                        continue
                    programs = min(-(-rows // rule.tile_rows), rule.max_programs)
                    named = {rule.rows_index: rows, rule.programs_index: programs}
                    values = enumerate(launch.arguments)
                    numbers = {place: value for place, value in values if not isinstance(value, Array)}
                    if any(numbers.pop(place) != value for place, value in named.items() if place is not None):
                        wrong.append(("argument", cols, rows, number))
                    if rule.scales_grid and launch.grid != (programs,):
                        wrong.append(("grid", cols, rows, number))
                    fixed.add((number, tuple(numbers.items()), () if rule.scales_grid else launch.grid))
            if len(keys) != 1 or len(fixed) > len(launches):
                wrong.append(("rows", str(dtype), cols, residual, stats, len(keys), len(fixed)))
print(json.dumps([shapes, wrong]))
"""


def test_rows_never_change_which_kernels_a_pass_takes():
    shapes, wrong = compile_elsewhere(ROWS)
    assert shapes > 100
    assert wrong == []


@pytest.mark.parametrize("stats", [False, True])
def test_results_are_repeated_where_the_caller_wants_them(stats, replaying):
    x, residual = torch.randn(2, 3, COLS)
    call(x, residual=residual, stats=stats)
    of_rows = [torch.empty(3), torch.empty(3)] if stats else [None, None]
    out = Forward(torch.empty(3, COLS), *of_rows, torch.empty(3, COLS))
    got = call(x, residual=residual, stats=stats, out=out)
    assert all(one is other for one, other in zip(got, out, strict=True))
    (launched,) = replaying.launched
    tensors = addresses(x, residual, WEIGHT, BIAS, out.y, out.residual_out, out.mean, out.rstd)
    assert [value for value in launched.parameters[:8] if value is not None] == tensors


@pytest.mark.parametrize(
    "out",
    [
        Forward(torch.empty(4, COLS)),
        Forward(torch.empty(3, COLS).half()),
        Forward(torch.empty(3, COLS), mean=torch.empty(3)),
        Forward(torch.empty(3, COLS), y_scale=torch.empty(3)),
    ],
)
def test_place_that_does_not_fit_is_not_repeated_but_refused(out, replaying):
    call()
    with pytest.raises(fusednorm.KernelInputError, match=r"out\."):
        call(out=out)
    assert not replaying.launched
