"""The functions against the oracle."""

from itertools import product

import pytest
import torch
from fusednorm import reference
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.cpu import batch_invariant
from fusednorm.tensors.arrays import FLOAT_DTYPES

from tests.sampling import mark_rest_slow

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
OPS = ("layer_norm", "rms_norm", "group_norm")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def assert_right(got, want) -> None:
    for name, right in want._asdict().items():
        found = getattr(got, name)
        assert (found is None) == (right is None), name
        if right is None:
            continue
        assert found.shape == right.shape
        assert found.stride() == right.stride()
        dtype = torch.float32 if name in ("mean", "rstd") else right.dtype
        assert found.dtype == dtype
        scale = right.double().abs().max().clamp(min=1)
        assert (found.double() - right.double()).abs().max() / scale <= TOLERANCES[dtype], name


SHAPES = {
    "layer_norm": [(7, 64), (1, 5000), (300, 1), (2, 131), (70, 4096)],
    "rms_norm": [(7, 64), (1, 5000), (300, 1), (2, 131), (70, 4096)],
    "group_norm": [(3, 8, 4, 5), (2, 16), (1, 8, 33), (2, 40, 1, 1)],
}
CASES = [
    (op, shape, channels_last)
    for op in OPS
    for shape in SHAPES[op]
    for channels_last in ((False, True) if len(shape) > 2 else (False,))
]


class TestKernels:
    @pytest.mark.parametrize(("case", "dtype", "mean"), mark_rest_slow(product(CASES, FLOAT_DTYPES, (0.0, 30.0))))
    def test_both_directions_with_everything(self, case, dtype, mean):
        op, shape, channels_last = case
        self.check_both_directions(op, shape, channels_last, dtype, mean, "silu")

    @pytest.mark.parametrize(
        ("op", "channels_last", "activation"), mark_rest_slow(product(OPS, [False, True], ACTIVATIONS))
    )
    def test_every_activation(self, op, channels_last, activation):
        shape = (3, 8, 4, 5) if op == "group_norm" else (7, 64)
        self.check_both_directions(op, shape, channels_last and op == "group_norm", torch.float32, 0.0, activation)

    def check_both_directions(self, op, shape, channels_last, dtype, mean, activation):
        def like_x(shift: float = 0.0) -> torch.Tensor:
            t = (torch.randn(shape) + shift).to(dtype)
            return t.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else t

        x, residual, dy, outside = like_x(mean), like_x(), like_x(), like_x()
        size = shape[1]
        options = {"weight": torch.randn(size), "residual": residual, "activation": activation, "eps": 1e-3}
        if op != "rms_norm":
            options["bias"] = torch.randn(size).bfloat16()
        if op == "group_norm":
            options |= {"scale": torch.randn(shape[:2]).half(), "shift": torch.randn(shape[:2])}
        groups = [4] if op == "group_norm" else []
        forward, backward = f"{op}_forward", f"{op}_backward"
        asked = options | {"stats": True, "out_dtype": torch.float32}
        said = getattr(batch_invariant, forward)(x, *groups, **asked)
        assert_right(said, getattr(reference, forward)(x, *groups, **asked, precision=torch.float64))
        asked = options | {"dresidual_out": outside}
        right = getattr(reference, backward)(dy, x, *groups, **asked, precision=torch.float64)
        assert_right(getattr(batch_invariant, backward)(dy, x, *groups, **asked), right)
        saved = {"rstd": said.rstd} if op == "rms_norm" else {"mean": said.mean, "rstd": said.rstd}
        assert_right(getattr(batch_invariant, backward)(dy, x, *groups, **asked, **saved), right)

    @pytest.mark.parametrize("dropout", [0.0, 0.4])
    @pytest.mark.parametrize("channels_last", [False, True])
    @pytest.mark.parametrize("given", [("scale",), ("shift",), ("scale", "shift")])
    def test_scale_and_shift_need_nothing_beside_them(self, given, channels_last, dropout):
        x, dy = torch.randn(3, 8, 4, 5), torch.randn(3, 8, 4, 5)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        options = {name: torch.randn(3, 8) for name in given}
        options |= {"activation": "gelu", "dropout": dropout, "seed": 3}
        right = reference.group_norm_forward(x, 4, **options, precision=torch.float64)
        assert_right(batch_invariant.group_norm_forward(x, 4, **options), right)
        right = reference.group_norm_backward(dy, x, 4, **options, precision=torch.float64)
        assert_right(batch_invariant.group_norm_backward(dy, x, 4, **options), right)

    @pytest.mark.parametrize("op", OPS)
    def test_large_mean_does_not_cancel(self, op):
        x = torch.randn(4, 16, 8, 8) + 1e4 if op == "group_norm" else torch.randn(4, 1000) + 1e4
        groups = [4] if op == "group_norm" else []
        weight = torch.ones(x.shape[1])
        dy = torch.randn_like(x)
        layouts = [x, x.contiguous(memory_format=torch.channels_last)] if groups else [x]
        for t in layouts:
            right = getattr(reference, f"{op}_backward")(dy, t, *groups, weight, precision=torch.float64)
            got = getattr(batch_invariant, f"{op}_backward")(dy, t, *groups, weight)
            for name in ("dx", "dweight"):
                error = (getattr(got, name) - getattr(right, name)).abs().max()
                assert error <= 2e-3 * getattr(right, name).abs().max().clamp(min=1), name


@pytest.mark.parametrize("cols", [8, 300_000])
def test_squares_beyond_float32_are_infinite(cols):
    x = torch.randn(3, cols)
    x[0, 0], x[1, 0] = 2e19, torch.inf
    got, alone = (batch_invariant.rms_norm_forward(each, stats=True) for each in (x, x[:1]))
    torch.testing.assert_close(got.y, torch.nn.functional.rms_norm(x, (cols,), eps=1e-6), equal_nan=True)
    assert torch.equal(got.rstd[:2], torch.zeros(2))
    assert torch.equal(alone.y, got.y[:1])
