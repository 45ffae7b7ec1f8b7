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
