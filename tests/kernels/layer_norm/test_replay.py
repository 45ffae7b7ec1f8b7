"""Which forward calls are launched again without checks and plan, with a driver that only takes notes."""

import fusednorm
import pytest
import torch
from fusednorm.api import layer_norm as layer_norm_passes
from fusednorm.device import INTERPRETED
from fusednorm.launch import prepared, repeats
from fusednorm.launch import row_replay as layer_norm_repeat
from fusednorm.launch.driver import Launcher
from fusednorm.ops.layer_norm import choice
from fusednorm.ops.layer_norm.call import ForwardCall
from fusednorm.policy import waiting
from fusednorm.results import Forward

from tests.kernels.api.norm_calls import Dispatched
from tests.kernels.compiled import compile_elsewhere

# Its driver stands in for one that is absent; test_launches_gpu.py has the real one.
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")

COLS = 48
WEIGHT, BIAS = torch.randn(2, COLS)


class Repeating:
    """Pretends that every interpreted launch left a compiled kernel; `launched` notes what is launched again."""

    def __init__(self):
        self.launched = []
        self.packed = False
        self.constants = ("constants", "of", "the", "kernel")

    def find(self, kernel, arguments, options, device):
        def run(*everything):
            self.launched.append(everything)

        launcher = Launcher(run, (11, (4, 1, 0), None), self.packed)
        return prepared.Prepared(launcher, self.constants, lambda device: 70 + device, None)

    def is_repeated(self, call):
        before = len(self.launched)
        call()
        return len(self.launched) > before


@pytest.fixture
def repeating(monkeypatch):
    driver = Repeating()
    monkeypatch.setattr(prepared, "find", driver.find)
    # The index of a CPU tensor's device.
    monkeypatch.setattr(layer_norm_repeat, "current_device", lambda: -1)
    return driver


def call(x=None, weight=WEIGHT, bias=BIAS, **options):
    return fusednorm.layer_norm_forward(torch.randn(3, COLS) if x is None else x, weight, bias, **options)


def addresses(*tensors):
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


@pytest.mark.parametrize("cols", [COLS, 1024, 1030, 2048])
@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_a_repeated_launch_is_the_planned_one(adds, stats, rows, cols, repeating):
    def operands(rows):
        return torch.randn(rows, cols), torch.randn(rows, cols) if adds else None

    weight, bias = torch.randn(cols), torch.randn(cols)
    x, residual = operands(2)
    call(x, weight, bias, residual=residual, eps=1e-3, stats=stats)
    assert not repeating.launched
    x, residual = operands(rows)
    result = call(x, weight, bias, residual=residual, eps=1e-3, stats=stats)
    given = ForwardCall(x=x, weight=weight, bias=bias, eps=1e-3, residual=residual, out=result)
    (plan,) = choice.plan_forward(given)
    y, mean, rstd, residual_out, _ = result
    tensors = addresses(x, residual, weight, bias, y, residual_out, mean, rstd)
    head = (*plan.grid, 1, 1, 69, 11, (4, 1, 0), None)
    assert repeating.launched == [(*head, *tensors, *plan.arguments[8:], *repeating.constants)]


@pytest.mark.parametrize("cols", [COLS, 2048])
def test_parameters_are_packed_where_the_launcher_wants_them_so(cols, repeating):
    x, weight, bias = torch.randn(5, cols), torch.randn(cols), torch.randn(cols)
    call(x, weight, bias)
    call(x, weight, bias)
    layer_norm_repeat._KNOWN.clear()
    repeating.packed = True
    call(x, weight, bias)
    call(x, weight, bias)
    one_by_one, packed = repeating.launched
    assert packed[:7] == one_by_one[:7]
    assert len(packed) == 8
    # y is another one each time.
    assert packed[7][:4] + packed[7][5:] == one_by_one[7:11] + one_by_one[12:]


def test_the_stride_of_a_single_row_is_not_taken_for_that_of_many(repeating):
    wide = torch.randn(5, 2 * COLS)
    call(wide[:1, :COLS])
    assert not repeating.is_repeated(lambda: call(wide[:, :COLS]))
    assert repeating.is_repeated(lambda: call(wide[:, :COLS]))
    assert repeating.is_repeated(lambda: call(wide[:1, :COLS]))
    # After grid, stream, head, tensors and rows: columns and the stride of x, in the same units.
    many, single = (launched[16:18] for launched in repeating.launched)
    assert many == (single[0], 2 * single[1])


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_a_repeated_call_allocates_what_a_planned_one_does(out_dtype, stats, repeating):
    def facts(result):
        return [t if t is None else (t.shape, t.stride(), t.dtype, t.is_contiguous()) for t in result]

    wide = torch.randn(2, 5, 2 * COLS)
    for x in (wide[0, :, :COLS], wide[:1, 0, :COLS], wide[..., :COLS].contiguous(), wide[0, 0, :COLS]):
        stream = torch.randn(x.shape).half()
        options = {"residual": stream, "out_dtype": out_dtype, "stats": stats}
        planned = facts(call(x, **options))
        before = len(repeating.launched)
        assert facts(call(x, **options)) == planned
        assert len(repeating.launched) == before + 1


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
    "y's dtype": {"out_dtype": torch.float16},
    "statistics": {"stats": True},
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_decides_a_launch_tells_calls_apart(what, repeating):
    call()
    assert not repeating.is_repeated(lambda: call(**CHANGES[what]))
    assert repeating.is_repeated(lambda: call(**CHANGES[what]))
    assert repeating.is_repeated(call)


def test_the_operation_and_the_residuals_dtype_and_strides_tell_calls_apart(repeating):
    x = torch.randn(3, COLS)
    call(x, bias=None)
    assert not repeating.is_repeated(lambda: fusednorm.rms_norm_forward(x, WEIGHT, eps=1e-5))
    for residual in (torch.randn(3, COLS), torch.randn(3, COLS).half(), torch.randn(3, 2 * COLS)[:, :COLS]):
        assert not repeating.is_repeated(lambda r=residual: call(x, residual=r))
        assert repeating.is_repeated(lambda r=residual: call(x, residual=r))


def test_whether_programs_may_wait_tells_calls_apart(repeating, monkeypatch):
    monkeypatch.setattr(waiting, "INTERPRETED", False)
    monkeypatch.setattr(waiting, "_allowed", True)
    fusednorm.allow_waiting(False)
    call()
    fusednorm.allow_waiting(True)
    assert not repeating.is_repeated(call)
    assert repeating.is_repeated(call)


NEVER = {
    "dropout": {"dropout": 0.5, "seed": 1},
    "a seed": {"seed": 1},
    "float8": {"out_dtype": torch.float8_e4m3fn},
    "no rows": {"x": torch.randn(0, COLS)},
    "misaligned x": {"x": torch.randn(3 * COLS + 1)[1:].view(3, COLS)},
    "misaligned weight": {"weight": torch.randn(COLS + 1)[1:]},
    "misaligned residual": {"residual": torch.randn(3 * COLS + 1)[1:].view(3, COLS)},
    "strided tokens": {"x": torch.randn(3, 2, 2 * COLS)[..., :COLS]},
    "heads of their own": {
        "x": torch.randn(3, 2, COLS),
        "weight": torch.randn(2, COLS),
        "bias": torch.randn(2, COLS),
    },
}


@pytest.mark.parametrize("what", NEVER)
def test_calls_that_follow_no_rule_are_planned_each_time(what, repeating):
    call()
    call(**{"residual": torch.randn(3, COLS)} if "residual" in what else {})
    for _ in range(2):
        assert not repeating.is_repeated(lambda: call(**NEVER[what]))


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
def test_wrong_calls_are_refused_after_right_ones(what, repeating):
    call()
    call(residual=torch.randn(3, COLS))
    for _ in range(2):
        with pytest.raises((fusednorm.KernelInputError, fusednorm.UnsupportedShapeError)):
            call(**WRONG[what])
    assert not repeating.launched


def test_kinds_are_bounded_and_the_oldest_goes(repeating, monkeypatch):
    monkeypatch.setattr(repeats, "MAX_KINDS", 3)
    for eps in (1.0, 2.0, 3.0, 4.0):
        call(eps=eps)
    assert len(layer_norm_repeat._KNOWN) == 3
    assert repeating.is_repeated(lambda: call(eps=4.0))
    assert not repeating.is_repeated(lambda: call(eps=1.0))


def test_a_watched_call_is_planned(repeating, monkeypatch):
    call()
    monkeypatch.setattr(prepared, "undisturbed", lambda: False)
    assert not repeating.is_repeated(call)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("adds", [False, True])
def test_a_differentiable_call_of_a_known_kind_is_repeated_unless_it_is_watched(adds, gradients, repeating):
    x, weight = (t.clone().requires_grad_(gradients) for t in (torch.randn(3, COLS), WEIGHT))
    residual = torch.randn(3, COLS) if adds else None

    def differentiable():
        if residual is None:
            return fusednorm.layer_norm(x, weight, BIAS)
        return fusednorm.add_layer_norm(x, residual, weight, BIAS)

    assert not repeating.is_repeated(differentiable)
    call(x.detach(), residual=residual, stats=gradients)
    assert repeating.is_repeated(differentiable)
    with Dispatched() as seen:
        assert not repeating.is_repeated(differentiable)
    assert seen.names == ["fusednorm::layer_norm"]
    result = differentiable()
    for tensor in (result,) if residual is None else result:
        assert tensor.requires_grad == gradients
    assert not repeating.is_repeated(lambda: fusednorm.layer_norm(x, weight, BIAS, dropout=0.5, seed=1))


def test_a_call_on_another_device_than_the_current_one_is_launched_there(repeating, monkeypatch):
    call()
    current = [3]

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.before, current[0] = current[0], self.device

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(layer_norm_repeat, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    assert repeating.is_repeated(call)
    assert current == [3]


def test_nothing_is_repeated_under_the_interpreter(monkeypatch):
    if not prepared.INTERPRETED:
        pytest.skip("kernels are compiled here")
    planned = []

    def plan(*arguments, **options):
        planned.append(choice.plan_forward(*arguments, **options))
        return planned[-1]

    monkeypatch.setattr(layer_norm_passes, "plan_forward", plan)
    for _ in range(2):
        assert isinstance(call(), Forward)
    assert len(planned) == 2
    assert not layer_norm_repeat._KNOWN


ROWS = """
import json
import torch
from fusednorm.launch import prepared
from fusednorm.ops.layer_norm import table as tables
from fusednorm.ops.layer_norm.call import BackwardCall, ForwardCall
from fusednorm.ops.layer_norm.choice import plan_backward, plan_forward
from fusednorm.results import Backward, Forward

def plan(rows, cols, dtype, residual, stats):
    x, y = (torch.empty(rows, cols, dtype=dtype, device="meta") for _ in range(2))
    w, s = torch.empty(cols, device="meta"), torch.empty(rows, device="meta")
    mean, rstd, residual = s if stats else None, s if stats else None, x if residual else None
    out, gradients = Forward(y, mean, rstd, residual), Backward(x, w, w, residual)
    given = dict(x=x, weight=w, bias=w, eps=1e-5, residual=residual)
    yield from plan_forward(ForwardCall(**given, out=out))
    yield from plan_backward(BackwardCall(dy=x, **given, mean=mean, rstd=rstd, out=gradients))

shapes, wrong = 0, []
for itemsize, dtype in ((2, torch.bfloat16), (4, torch.float32)):
    lengths = [min(limit, 50257) for limit, _ in (*tables.FORWARD[itemsize], *tables.BACKWARD[itemsize])]
    for cols in sorted({cols - less for cols in lengths for less in (0, 3)}):
        for residual, stats in ((False, False), (False, True), (True, True)):
            shapes += 1
            keys, fixed = set(), set()
            for rows in (1, 2, 3, 17, 131, 133, 1000, 10**6):
                launches = list(plan(rows, cols, dtype, residual, stats))
                keys.add(tuple(prepared._described(l.kernel, l.arguments, l.options, 0)[0] for l in launches))
                by_rows = launches[0].by_rows
                if by_rows is None:
                    continue
                rest = launches[0].arguments[8:]
                fixed.add(rest[by_rows.argument:])
                if launches[0].grid != (by_rows.programs(rows),) or (by_rows.argument and rest[0] != rows):
                    wrong.append(("rule", cols, rows))
            if len(keys) != 1 or len(fixed) > 1:
                wrong.append(("rows", str(dtype), cols, residual, stats, len(keys), len(fixed)))
print(json.dumps([shapes, wrong]))
"""


def test_rows_never_change_which_kernels_a_pass_takes():
    shapes, wrong = compile_elsewhere(ROWS)
    assert shapes > 100
    assert wrong == []


@pytest.mark.parametrize("stats", [False, True])
def test_results_are_repeated_where_the_caller_wants_them(stats, repeating):
    x, residual = torch.randn(2, 3, COLS)
    call(x, residual=residual, stats=stats)
    of_rows = [torch.empty(3), torch.empty(3)] if stats else [None, None]
    out = Forward(torch.empty(3, COLS), *of_rows, torch.empty(3, COLS))
    got = call(x, residual=residual, stats=stats, out=out)
    assert all(one is other for one, other in zip(got, out, strict=True))
    (launched,) = repeating.launched
    tensors = addresses(x, residual, WEIGHT, BIAS, out.y, out.residual_out, out.mean, out.rstd)
    assert launched[7:15] == tensors


@pytest.mark.parametrize(
    "out",
    [
        Forward(torch.empty(4, COLS)),
        Forward(torch.empty(3, COLS).half()),
        Forward(torch.empty(3, COLS), mean=torch.empty(3)),
        Forward(torch.empty(3, COLS), scale=torch.empty(3)),
    ],
)
def test_place_that_does_not_fit_is_not_repeated_but_refused(out, repeating):
    call()
    with pytest.raises(fusednorm.KernelInputError, match=r"out\."):
        call(out=out)
    assert not repeating.launched
