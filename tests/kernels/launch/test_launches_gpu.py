"""Launches that go around Triton's own lookup: nothing compiled for rows, nothing lost, nothing unseen."""

import fusednorm
import pytest
import torch
from fusednorm.api import chain as chain_pass
from fusednorm.api import layer_norm as layer_norm_passes
from fusednorm.launch import replay_cache
from triton import knobs

from tests.kernels.harness.on_gpu import watched
from tests.kernels.ops.layer_norm.cases import DTYPES, Case, check_backward, check_forward, make_case

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 17, 131, 132, 133, 1000, 4097)


@pytest.fixture
def compiles(monkeypatch):
    """The kernels that are not in Triton's cache of this process, as they come."""
    names = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **compiled: names.append(compiled["fn"].name))
    return names


def no_plan(*_, **__):
    raise AssertionError("planned anew")


@pytest.mark.parametrize("cols", [63, 80, 1001, 1024, 1037, 5120, 8192, 20000, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_rows_never_cause_a_compile(op, dtype, cols, device, compiles):
    def passes(rows):
        case = make_case(op, dtype, rows, cols, device)
        for stats in (False, True):
            case.forward(fusednorm, stats=stats)
        case.backward(fusednorm, torch.randn_like(case.x))

    passes(1)
    compiles.clear()
    for rows in ROWS:
        passes(rows)
    assert compiles == []


@pytest.mark.parametrize("cols", [777, 2777, 40777])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_nothing_is_compiled_after_a_warmup(op, cols, device, compiles):
    fusednorm.warmup(op, torch.bfloat16, cols, device=device)
    compiles.clear()
    for rows in ROWS:
        x = torch.randn(rows, cols, device=device, dtype=torch.bfloat16, requires_grad=True)
        parameters = torch.randn(2 if op == "layer_norm" else 1, 8 * cols, device=device, dtype=torch.bfloat16)
        parameters = [p[:cols].clone().requires_grad_() for p in parameters]
        getattr(fusednorm, op)(x, *parameters).backward(torch.randn_like(x))
        with torch.no_grad():
            getattr(fusednorm, op)(x, *parameters)
    assert compiles == []


def forbid_plans(monkeypatch):
    for plan in ("plan_forward", "plan_backward"):
        monkeypatch.setattr(layer_norm_passes, plan, no_plan)
    monkeypatch.setattr(chain_pass, "plan_chain", no_plan)


def assert_same(results, wanted):
    for again, first in zip(results, wanted, strict=True):
        assert again is first is None or torch.equal(again.float(), first.float())


@pytest.mark.parametrize("cols", [64, 768, 1024, 1040, 4096, 5120, 14336, 16384, 40000, 300000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_repeated_calls_give_the_bits_of_the_first(op, residual, dtype, cols, device, poisoned, monkeypatch):
    sizes = (5, 300, 1) if cols < 20000 else (5, 3, 1)
    cases = [make_case(op, dtype, rows, cols, device, residual=residual) for rows in sizes]

    def results(case):
        plain, forward = (case.forward(fusednorm, stats=stats) for stats in (False, True))
        saved = {"rstd": forward.rstd} | ({} if op == "rms_norm" else {"mean": forward.mean})
        backward = *case.backward(fusednorm, case.dy), *case.backward(fusednorm, case.dy, **saved)
        return [*plain, *forward, *backward]

    planned = []
    for case in cases:
        replay_cache.clear_replays()
        case.dy = torch.randn_like(case.x)
        planned.append(results(case))
    for case in cases:
        results(case)
    forbid_plans(monkeypatch)
    for case, wanted in zip(cases, planned, strict=True):
        check_forward(case)
        assert_same(results(case), wanted)


@pytest.mark.parametrize("cols", [64, 1024, 4096, 8192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_rows_repeats_the_first(dtype, cols, device, poisoned, monkeypatch):
    def results(rows):
        torch.manual_seed(rows)
        case = make_case("layer_norm", dtype, rows, cols, device)
        forward = case.forward(fusednorm, stats=True)
        dy = torch.randn_like(case.x)
        chained = fusednorm.layer_norm_chain(case.x, [case.weight, None], [case.bias, None])
        float8 = fusednorm.layer_norm_forward(case.x, case.weight, case.bias, out_dtype=torch.float8_e4m3fn)
        return [*forward, *case.backward(fusednorm, dy), chained, float8.y, float8.y_scale]

    wanted = {}
    for rows in ROWS:
        replay_cache.clear_replays()
        wanted[rows] = results(rows)
    replay_cache.clear_replays()
    results(2)
    forbid_plans(monkeypatch)
    for rows in ROWS:
        assert_same(results(rows), wanted[rows])


@pytest.mark.parametrize("cols", [64, 1000, 4096, 16384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_lie_otherwise_are_told_apart(dtype, cols, device, poisoned):
    wide = torch.randn(20, 2 * cols + 24, device=device, dtype=dtype)
    weight, bias = (torch.randn(cols + 1, device=device, dtype=dtype) for _ in range(2))
    rows = (wide[:, :cols], wide[:, 1 : cols + 1], wide[:, 8 : cols + 8], wide[::2, :cols], wide[:, :cols].clone())
    for _ in range(2):
        for x in rows:
            for start in (0, 1):
                case = Case("layer_norm", x, weight[start : start + cols], bias[:cols])
                check_forward(case)
                check_backward(case, saved=False)


def test_a_call_runs_on_the_current_stream(device):
    case = make_case("layer_norm", torch.float32, 4, 4096, device)
    case.forward(fusednorm)
    case.forward(fusednorm)
    stream = torch.cuda.Stream(device)
    x = torch.zeros_like(case.x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.copy_(case.x)
        y = fusednorm.layer_norm_forward(x, case.weight, case.bias).y
    stream.synchronize()
    assert torch.equal(y, case.forward(fusednorm).y)


@pytest.mark.parametrize("cols", [1024, 4096, 40000])
def test_a_call_is_captured_into_a_graph(cols, device):
    case = make_case("layer_norm", torch.bfloat16, 7, cols, device)
    dy = torch.randn_like(case.x)
    for _ in range(2):
        case.forward(fusednorm)
        case.backward(fusednorm, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward, backward = case.forward(fusednorm), case.backward(fusednorm, dy)
    case.x.copy_(torch.randn_like(case.x))
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(forward.y, case.forward(fusednorm).y)
        assert torch.equal(backward.dx, case.backward(fusednorm, dy).dx)


def test_a_known_call_goes_straight_to_the_driver(device):
    make_case("layer_norm", torch.bfloat16, 1, 4096, device).forward(fusednorm)
    (known,) = replay_cache._KNOWN.values()
    (start,) = known.template.launches
    assert start.kernel.launcher.function is start.kernel.compiled_kernel.run.launch


def test_hooks_see_every_launch(device):
    case = make_case("layer_norm", torch.float32, 4, 4096, device)
    case.forward(fusednorm)
    case.forward(fusednorm)
    with watched() as seen:
        y = case.forward(fusednorm).y
    assert len(seen) == 1
    assert seen[0].startswith("layer_norm_forward")
    assert torch.equal(y, case.forward(fusednorm).y)
    assert len(seen) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cols", [4096, 40000])
def test_each_tensor_is_computed_where_it_is(cols):
    for _ in range(3):
        for index in range(2):
            case = make_case("layer_norm", torch.bfloat16, 9, cols, torch.device("cuda", index))
            check_forward(case)
            check_backward(case, saved=False)
            assert torch.cuda.current_device() == 0
