from dataclasses import replace
from itertools import product

import pytest
import torch
from fusednorm.reference.dropout import compute_dropout_mask

from benchmarks.harness.oracle import ResultOracle, WrongResultError, compute_exact_results, compute_keep_mask
from benchmarks.providers.own_provider import make_own_run
from benchmarks.providers.torch_provider import make_eager_run
from benchmarks.workload.problems import SEED, BenchmarkProblem, ProviderRun
from tests.sampling import mark_rest_slow


@pytest.mark.parametrize("provider", [make_own_run, make_eager_run])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "pass_", "variant"),
    [
        ("layer_norm", "forward", "plain"),
        ("layer_norm", "forward", "residual_dropout"),
        ("layer_norm", "backward", "dropout"),
        ("rms_norm", "forward", "residual"),
        ("rms_norm", "backward", "plain"),
        ("rms_norm", "backward", "dropout"),
        ("layer_norm", "backward", "residual"),
        ("layer_norm", "forward", "residual_float32"),
        ("rms_norm", "backward", "residual_float32"),
        ("layer_norm", "forward", "chain"),
    ],
)
def test_right_results_pass(problem, provider, dtype, op, pass_, variant):
    it = problem(op, pass_, variant, dtype=dtype)
    assert 0 < ResultOracle(it).measure_error(provider(it)) < 0.2


@pytest.mark.parametrize("provider", [make_own_run, make_eager_run])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_right_heads_pass(problem, provider, op, pass_):
    it = problem(op, pass_, "per_head", shape=(6, 3, 64), layout="heads")
    assert it.weight.shape == (3, 64)
    assert 0 < ResultOracle(it).measure_error(provider(it)) < 1e-4


@pytest.mark.parametrize("provider", [make_own_run, make_eager_run])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_right_rows_of_float8_pass(problem, provider, op):
    it = problem(op, variant="float8")
    y, scale = provider(it).call()
    assert y.dtype == torch.float8_e4m3fn
    assert scale.shape == (6,)
    assert 0 < ResultOracle(it).measure_error(provider(it)) < 0.5


def test_float8_in_steps_twice_as_large_fails(problem):
    it = problem(variant="float8")
    exact, scale = compute_exact_results(it)
    with pytest.raises(WrongResultError, match="result 0"):
        ResultOracle(it).measure_error(
            ProviderRun(lambda: (_float8(exact / scale[:, None] / 64), scale.float() * 64))
        )


def test_a_scale_that_leaves_half_the_range_empty_fails(problem):
    it = problem(variant="float8", dtype="bfloat16")
    exact, scale = compute_exact_results(it)
    with pytest.raises(WrongResultError, match="result 1"):
        ResultOracle(it).measure_error(
            ProviderRun(lambda: (_float8(exact / scale[:, None] / 2), scale.float() * 2))
        )


def _float8(rows):
    return rows.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("pass_", "layout", "variant", "provider"),
    mark_rest_slow(
        product(
            ["forward", "backward"],
            ["nchw", "nhwc"],
            ["plain", "silu", "residual", "scale_shift_silu", "no_affine"],
            [make_own_run, make_eager_run],
        )
    ),
)
def test_right_groups_pass(problem, provider, layout, pass_, variant):
    it = problem("group_norm", pass_, variant, shape=(2, 8, 4, 4), groups=4, layout=layout)
    assert 0 < ResultOracle(it).measure_error(provider(it)) < 1e-5


@pytest.mark.parametrize(
    ("pass_", "layout", "variant", "provider"),
    mark_rest_slow(
        product(["forward", "backward"], ["nchw", "nhwc"], ["plain", "leaky_relu"], [make_own_run, make_eager_run])
    ),
)
def test_right_instances_pass(problem, provider, layout, pass_, variant):
    it = problem("group_norm", pass_, variant, shape=(2, 8, 2, 3, 4), groups=8, layout=layout)
    assert 0 < ResultOracle(it).measure_error(provider(it)) < 1e-5


@pytest.mark.parametrize("provider", [make_own_run, make_eager_run])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_right_norms_over_channels_pass(problem, provider, layout, pass_):
    it = problem(pass_=pass_, shape=(2, 24, 4, 5), layout=layout)
    assert 0 < ResultOracle(it).measure_error(provider(it)) < 1e-5


@pytest.mark.parametrize(
    ("op", "pass_", "variant", "dtype", "provider"),
    mark_rest_slow(
        product(
            ["layer_norm", "rms_norm"],
            ["forward", "backward"],
            ["adaptive", "gated"],
            ["float32", "bfloat16"],
            [make_own_run, make_eager_run],
        )
    ),
)
def test_right_samples_pass(problem, provider, op, pass_, variant, dtype):
    it = problem(op, pass_, variant, shape=(2, 5, 64), layout="samples", dtype=dtype)
    assert 0 < ResultOracle(it).measure_error(provider(it)) < (1e-4 if dtype == "float32" else 0.3)


@pytest.mark.parametrize(
    ("pass_", "shapes"),
    [
        ("forward", [(2, 5, 64), (2, 5, 64)]),
        ("backward", [(2, 5, 64), (2, 64), (2, 64), (2, 64), (2, 5, 64)]),
    ],
)
def test_each_wrong_result_of_a_gate_fails(problem, pass_, shapes):
    it = problem(pass_=pass_, variant="gated", shape=(2, 5, 64), layout="samples")
    right = make_own_run(it).call()
    assert [tuple(result.shape) for result in right] == shapes
    for index in range(len(right)):
        results = (*right[:index], right[index] + 0.1, *right[index + 1 :])
        with pytest.raises(WrongResultError, match=f"result {index}"):
            ResultOracle(it).measure_error(ProviderRun(lambda results=results: results))


def test_wrong_gradients_of_scale_and_shift_fail(problem):
    it = problem("group_norm", "backward", "scale_shift_silu", shape=(2, 8, 4, 4), groups=4)
    right = make_own_run(it).call()
    assert [tuple(result.shape) for result in right[1:]] == [(8,), (8,), (2, 8), (2, 8)]
    for index in (3, 4):
        results = (*right[:index], right[index] + 0.1, *right[index + 1 :])
        with pytest.raises(WrongResultError, match=f"result {index}"):
            ResultOracle(it).measure_error(ProviderRun(lambda results=results: results))


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_each_wrong_gradient_fails(problem, index):
    it = problem(pass_="backward", variant="residual_float32", dtype="float16")
    results = list(make_own_run(it).call())
    results[index] = results[index].clone()
    results[index].view(-1)[-1] += 0.5
    with pytest.raises(WrongResultError, match=f"result {index}"):
        ResultOracle(it).measure_error(ProviderRun(lambda: tuple(results)))


def test_a_wrong_residual_sum_fails(problem):
    it = problem(variant="residual")
    y, residual_out = make_own_run(it).call()
    with pytest.raises(WrongResultError, match="result 1"):
        ResultOracle(it).measure_error(ProviderRun(lambda: (y, residual_out + 0.01)))


def test_nan_fails(problem):
    it = problem()
    with pytest.raises(WrongResultError):
        ResultOracle(it).measure_error(ProviderRun(lambda: (it.x * float("nan"),)))


def test_either_derivative_of_leaky_relu_is_right_at_zero_alone(problem):
    it = problem("group_norm", "backward", "leaky_relu", shape=(2, 8, 16, 16), groups=8, dtype="bfloat16")
    z = compute_exact_results(BenchmarkProblem(replace(it.cell, pass_="forward", variant="plain"), it.tensors))[0]
    dx, *parameters = make_own_run(it).call()

    def measure_with_error(elements):
        wrong = dx + 5.0 * elements.to(dx.dtype)
        return ResultOracle(it).measure_error(ProviderRun(lambda: (wrong, *parameters)))

    assert 0 < measure_with_error(z.abs() < 0.05) < 0.2
    with pytest.raises(WrongResultError, match="result 0"):
        measure_with_error((z.abs() > 0.05) & (z.abs() < 0.1))


def test_a_missing_gradient_fails(problem):
    it = problem(pass_="backward")
    with pytest.raises(WrongResultError, match="3 results expected, got 2"):
        ResultOracle(it).measure_error(ProviderRun(lambda: make_own_run(it).call()[:2]))


def test_dropout_at_another_rate_fails(problem):
    it = problem(variant="dropout", shape=(64, 256))
    exact = compute_exact_results(it, torch.ones_like(it.x, dtype=torch.bool))[0] * 0.9

    def half():
        return (torch.nn.functional.dropout(exact, 0.5),)

    with pytest.raises(WrongResultError, match="kept"):
        ResultOracle(it).measure_error(ProviderRun(half, find_kept=lambda results: results[0] != 0))


def test_what_must_be_put_back_is_put_back_first(problem):
    it = problem()
    y = torch.empty_like(it.x)
    ResultOracle(it).measure_error(
        ProviderRun(lambda: (y,), restore_inputs=lambda: y.copy_(make_own_run(it).call()[0]))
    )


def test_parts_sum_to_the_whole(problem, monkeypatch):
    it = problem(pass_="backward", variant="dropout")
    whole = compute_exact_results(it)
    monkeypatch.setattr("benchmarks.harness.oracle._PART_NUMEL", 512)
    for part, all_at_once in zip(compute_exact_results(it), whole, strict=True):
        torch.testing.assert_close(part, all_at_once)


@pytest.mark.parametrize(
    "arguments",
    [
        {"op": "group_norm", "variant": "scale_shift_silu", "shape": (3, 8, 4, 4), "groups": 4},
        {"op": "layer_norm", "variant": "gated", "shape": (3, 2, 64), "layout": "samples"},
    ],
)
def test_gradients_of_samples_come_out_of_parts_whole(problem, monkeypatch, arguments):
    it = problem(pass_="backward", **arguments)
    whole = compute_exact_results(it)
    monkeypatch.setattr("benchmarks.harness.oracle._PART_NUMEL", 128)
    for part, all_at_once in zip(compute_exact_results(it), whole, strict=True):
        torch.testing.assert_close(part, all_at_once)


def test_the_mask_is_the_library_s(device):
    x = torch.empty(7, 30, device=device)
    whole = compute_dropout_mask(SEED, 7, 30, 0.3, device)
    assert torch.equal(compute_keep_mask(x, slice(2, 6), 0.3), whole[2:6])
