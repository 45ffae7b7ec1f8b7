"""Every operation, direction, dtype and flag over HTTP, against the oracle in float64 and against torch."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import reference

from .wire import DTYPES, NPY, SAFETENSORS, from_npy, npy, packed, unpacked

OPS = ("layer_norm", "rms_norm", "group_norm")
ACTIVATIONS = ("none", "relu", "silu", "gelu", "gelu_tanh")
GROUPS = 4
# Rounding of the result to its own type, and of what was summed in float32 on the way there.
TOLERANCES = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


class Case:
    """One operation on tensors of one dtype: how it is asked for, and what is right."""

    def __init__(self, op: str, dtype: torch.dtype, parameters: torch.dtype | None, nhwc: bool = False):
        self.op, self.nhwc = op, nhwc
        self.shape = (3, 4, 5, 8) if nhwc else (3, 8, 4, 5) if op == "group_norm" else (2, 3, 64)
        size = 8 if op == "group_norm" else 64
        self.x = torch.randn(self.shape).to(dtype)
        self.weight = self.bias = None
        if parameters is not None:
            self.weight = torch.randn(size).to(parameters)
            self.bias = torch.randn(size).to(parameters) if op != "rms_norm" else None

    def like_x(self) -> torch.Tensor:
        return torch.randn(self.shape).to(self.x.dtype)

    def query(self, **parameters: object) -> dict[str, object]:
        if self.op == "group_norm":
            parameters |= {"num_groups": GROUPS, "layout": "nhwc" if self.nhwc else "nchw"}
        return parameters

    def right(self, direction: str, *leading: torch.Tensor, **options: object) -> dict[str, torch.Tensor]:
        """The oracle's answer, in the payload's layout."""
        options |= {"weight": self.weight, "precision": torch.float64}
        if self.op != "rms_norm":
            options["bias"] = self.bias
        groups = [GROUPS] if self.op == "group_norm" else []
        options = {name: self._first(name, value) for name, value in options.items()}
        leading = [self._first("x", tensor) for tensor in leading]
        result = getattr(reference, f"{self.op}_{direction}")(*leading, *groups, **options)
        named = {name: tensor for name, tensor in result._asdict().items() if tensor is not None}
        named.pop("dresidual", None)
        return {name: self._last(name, tensor) for name, tensor in named.items()}

    def _first(self, name: str, value: object) -> object:
        moves = self.nhwc and isinstance(value, torch.Tensor) and value.dim() > 2
        return value.movedim(-1, 1) if moves else value

    def _last(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim(1, -1) if self.nhwc and tensor.dim() > 2 else tensor


def post(api, path: str, content: bytes, **query: object) -> dict[str, torch.Tensor]:
    response = api.post(path, content=content, params=query, headers={"content-type": SAFETENSORS})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == SAFETENSORS
    return unpacked(response.content)


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, right in want.items():
        dtype = torch.float32 if name in ("mean", "rstd") else right.dtype
        assert got[name].dtype == dtype, name
        assert got[name].shape == right.shape, name
        scale = right.double().abs().max().clamp(min=1)
        error = (got[name].double() - right.double()).abs().max() / scale
        assert error <= TOLERANCES[dtype], (name, error)


CASES = [
    pytest.param(op, dtype, parameters, nhwc, id=f"{op}-{dtype}-{parameters}{'-nhwc' if nhwc else ''}")
    for op in OPS
    for dtype, parameters in itertools.product(DTYPES, (*DTYPES, None))
    for nhwc in ((False, True) if op == "group_norm" else (False,))
]


@pytest.mark.parametrize(("op", "dtype", "parameters", "nhwc"), CASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
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


@pytest.mark.parametrize(("op", "dtype", "parameters", "nhwc"), CASES)
@pytest.mark.parametrize("activation", ["none", "gelu"])
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


def default_eps(op: str) -> float:
    return 1e-6 if op == "rms_norm" else 1e-5
