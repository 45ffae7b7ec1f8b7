"""Every operation, direction, dtype and flag over HTTP, against the oracle in float64 and against torch."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from normserve.codec.api_names import ACTIVATIONS

from tests.integration.api.operations.cases import GROUPS, Case, assert_close, default_eps, post
from tests.integration.harness.wire import DTYPES, NPY, from_npy, npy, packed

OPS = ("layer_norm", "rms_norm", "group_norm")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


CASES = [
    (op, dtype, parameters, nhwc)
    for op in OPS
    for dtype, parameters in itertools.product(DTYPES, (*DTYPES, None))
    for nhwc in ((False, True) if op == "group_norm" else (False,))
]


def by_turns(activations: Iterable[str]) -> list[tuple[object, ...]]:
    """Every case with one of the activations; `kernels/cpu/batch_invariant/test_oracle.py` takes all."""
    return [(*case, activation) for case, activation in zip(CASES, itertools.cycle(activations), strict=False)]


@pytest.mark.parametrize(("op", "dtype", "parameters", "nhwc", "activation"), by_turns(ACTIVATIONS))
def test_forward(api, op, dtype, parameters, nhwc, activation):
    case = Case(op, DTYPES[dtype], DTYPES.get(parameters), nhwc)
    content = packed(x=case.x, weight=case.weight, bias=case.bias)
    got = post(api, f"/v1/{op}", content, **case.query(activation=activation))
    assert_close(got, case.right("forward", case.x, eps=default_eps(op), activation=activation))


@pytest.mark.parametrize(("op", "dtype", "parameters", "nhwc"), CASES)
def test_forward_with_residual_statistics_and_another_dtype(api, op, dtype, parameters, nhwc):
    case = Case(op, DTYPES[dtype], DTYPES.get(parameters), nhwc)
    residual = case.like_x()
    content = packed(x=case.x, residual=residual, weight=case.weight, bias=case.bias)
    query = case.query(stats="true", out_dtype="float32", eps=0.01, activation="silu")
    right = case.right(
        "forward",
        case.x,
        residual=residual,
        eps=0.01,
        activation="silu",
        out_dtype=torch.float32,
        stats=True,
    )
    assert_close(post(api, f"/v1/{op}", content, **query), right)


@pytest.mark.parametrize(("op", "dtype", "parameters", "nhwc", "activation"), by_turns(ACTIVATIONS))
def test_backward(api, op, dtype, parameters, nhwc, activation):
    case = Case(op, DTYPES[dtype], DTYPES.get(parameters), nhwc)
    dy = case.like_x()
    content = packed(x=case.x, dy=dy, weight=case.weight, bias=case.bias)
    got = post(api, f"/v1/{op}/backward", content, **case.query(activation=activation))
    assert_close(got, case.right("backward", dy, case.x, eps=default_eps(op), activation=activation))


@pytest.mark.parametrize("nhwc", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_backward_of_what_forward_said(api, op, nhwc):
    """Saved statistics, a residual and an outside gradient of its sum, all in one."""
    case = Case(op, torch.float32, torch.float32, nhwc and op == "group_norm")
    residual, dy, outside = case.like_x(), case.like_x(), case.like_x()
    forward = post(
        api,
        f"/v1/{op}",
        packed(x=case.x, residual=residual, weight=case.weight, bias=case.bias),
        **case.query(stats=1),
    )
    saved = {name: forward[name] for name in ("mean", "rstd") if name in forward}
    content = packed(
        x=case.x,
        residual=residual,
        dy=dy,
        dresidual_out=outside,
        weight=case.weight,
        bias=case.bias,
        **saved,
    )
    right = case.right("backward", dy, case.x, eps=default_eps(op), residual=residual, dresidual_out=outside)
    assert_close(post(api, f"/v1/{op}/backward", content, **case.query()), right)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", OPS)
def test_dropout_draws_the_mask_of_its_seed(api, op, direction):
    case = Case(op, torch.float32, torch.float32)
    dy = case.like_x() if direction == "backward" else None
    content = packed(x=case.x, dy=dy, weight=case.weight, bias=case.bias)
    path = f"/v1/{op}" + ("/backward" if dy is not None else "")
    seed = -(2**62) - 7
    leading = (case.x,) if dy is None else (dy, case.x)
    right = case.right(direction, *leading, eps=default_eps(op), dropout=0.4, seed=seed)
    assert_close(post(api, path, content, **case.query(dropout=0.4, seed=seed)), right)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_npy_in_and_out(api, dtype):
    x = torch.randn(5, 33).numpy().astype(dtype)
    response = api.post("/v1/layer_norm", content=npy(x), headers={"content-type": NPY})
    assert response.headers["content-type"] == NPY
    y = from_npy(response.content)
    assert y.dtype == dtype
    expected = F.layer_norm(torch.from_numpy(x).float(), (33,)).numpy()
    np.testing.assert_allclose(y, expected, atol=2e-6 if dtype is np.float32 else 2e-3)


def test_column_major_npy_is_turned_round(api):
    x = np.asfortranarray(torch.randn(4, 6, 5).numpy())
    response = api.post("/v1/layer_norm", content=npy(x), headers={"content-type": NPY})
    expected = F.layer_norm(torch.from_numpy(x.copy(order="C")), (5,)).numpy()
    np.testing.assert_allclose(from_npy(response.content), expected, atol=2e-6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("direction", ["", "/backward"])
def test_no_rows_give_empty_outputs(api, op, direction):
    shape = (0, 8, 3) if op == "group_norm" else (2, 0, 8)
    x = torch.empty(shape, dtype=torch.bfloat16)
    weight, bias = torch.ones(8), None if op == "rms_norm" else torch.ones(8)
    query = {"num_groups": GROUPS} if op == "group_norm" else {}
    if direction:
        got = post(api, f"/v1/{op}/backward", packed(x=x, dy=x, weight=weight, bias=bias), **query)
        assert got["dx"].shape == x.shape
        assert not got["dweight"].any()
    else:
        got = post(api, f"/v1/{op}", packed(x=x, residual=x, weight=weight), stats=1, **query)
        assert got["y"].shape == got["residual_out"].shape == x.shape
        assert got["rstd"].shape == ((0, GROUPS) if op == "group_norm" else (2, 0))


def test_nan_and_infinity_are_data(api):
    x = torch.randn(4, 16)
    x[1, 3], x[2, 0] = float("nan"), float("inf")
    y = post(api, "/v1/layer_norm", packed(x=x))["y"]
    assert y.isnan()[1:3].all()
    torch.testing.assert_close(y[[0, 3]], F.layer_norm(x[[0, 3]], (16,)))


def test_one_element_rows(api):
    x, bias = torch.randn(1000, 1), torch.tensor([0.5])
    y = post(api, "/v1/layer_norm", packed(x=x, weight=torch.ones(1), bias=bias))["y"]
    torch.testing.assert_close(y, torch.full_like(x, 0.5))


def test_a_row_wider_than_any_fast_path(api):
    x = torch.randn(1, 300_001)
    y = post(api, "/v1/rms_norm", packed(x=x))["y"]
    torch.testing.assert_close(y, F.rms_norm(x, (300_001,), eps=1e-6), atol=1e-5, rtol=1e-5)


def test_a_large_mean_does_not_cancel(api):
    x = torch.randn(2, 8, 6, 6) + 1e4
    for layout, sent in (("nchw", x), ("nhwc", x.movedim(1, -1))):
        got = post(api, "/v1/group_norm", packed(x=sent), num_groups=2, layout=layout)["y"]
        want = F.group_norm(x.double(), 2).movedim(1, -1) if layout == "nhwc" else F.group_norm(x.double(), 2)
        assert (got.double() - want).abs().max() < 5e-3
