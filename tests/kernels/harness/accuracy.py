"""What right means: no further from float64 than twice torch's own error in the same dtype, plus one ulp."""

import torch
from torch import Tensor


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance from each float64 value to the next one that dtype can hold."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(value.abs().clamp_min(info.smallest_normal)))
    return torch.exp2(exponent) * info.eps


def assert_close_to_oracle(
    actual: Tensor, exact: Tensor, torch_result: Tensor, what: str = "result", noise: float = 0.0
) -> None:
    """`actual` against the float64 oracle, allowed twice the worst error of `torch_result` plus one ulp.

    `noise` is allowed on top: what sums of that magnitude lose in float32, where torch's error may be 0 by luck.
    """
    assert actual.shape == exact.shape, what
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isnan(actual), torch.isnan(exact)), f"{what}: NaN in other places"
    error = (actual.double() - exact)[finite].abs()
    if not error.numel():
        return
    torch_error = (torch_result.double() - exact)[finite].abs().max()
    slack = error - 2 * torch_error - ulp(exact[finite], actual.dtype) - noise
    worst = int(slack.argmax())
    assert slack[worst] <= 0, (
        f"{what}: error {error[worst]:.3g} at value {exact[finite][worst]:.6g}, torch's worst {torch_error:.3g}"
    )


def assert_float8_close_to_oracle(
    actual: Tensor, scale: Tensor, exact: Tensor, torch_result: Tensor, noise: float = 0.0
) -> None:
    """A float8 result and its rows' scales against the float64 oracle before its quantisation.

    Every element must be what rounding makes of some value as near to `exact` as `assert_close_to_oracle` asks of
    float32, over the row's scale to 2^-20: the oracle's own, or at a rounding boundary its neighbour.

    Args:
        actual: [..., cols] float8_e4m3fn.
        scale: [...] float32.
        exact: [..., cols] float64.
        torch_result: [..., cols], torch's own in float32.
        noise: as in `assert_close_to_oracle`.
    """
    assert actual.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert (actual.shape, scale.shape) == (exact.shape, exact.shape[:-1])
    allowed = 2 * (torch_result.double() - exact).abs().max() + ulp(exact, torch.float32) + noise
    exact_scale = (exact.abs().amax(-1) / 448).clamp_min(2.0**-126)
    torch.testing.assert_close(scale.double(), exact_scale, rtol=1e-6, atol=float(allowed.max()) / 448)
    quotient = exact / exact_scale.unsqueeze(-1)
    margin = allowed / exact_scale.unsqueeze(-1) + quotient.abs() * 2.0**-20
    low, high = ((quotient + side * margin).clamp(-448, 448).to(actual.dtype).float() for side in (-1, 1))
    values = actual.float()
    outside = ~((low <= values) & (values <= high))
    assert not outside.any(), (
        f"{int(outside.sum())} elements off, the first {values[outside][0]} where {quotient[outside][0]} is exact"
    )
