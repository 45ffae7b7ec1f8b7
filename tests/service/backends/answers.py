"""What a device answers against what the oracle does."""

import torch

TOLERANCES = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 33 / 448}


def assert_right(got: dict[str, torch.Tensor], want, moved: bool, least_tolerance: float = 0.0) -> None:
    """Args: want: the oracle's; moved: whether channels come last in what came."""
    named = {name: tensor for name, tensor in want._asdict().items() if tensor is not None}
    if "y_scale" in named:
        # Its name in the API.
        named["scale"] = named.pop("y_scale")
    if "dresidual" in named and named["dresidual"] is named["dx"]:
        # One tensor is the gradient of both.
        del named["dresidual"]
    assert got.keys() == named.keys()
    for name, right in named.items():
        expected = right.movedim(1, -1) if moved and right.dim() > 2 else right
        dtype = torch.float32 if name in ("mean", "rstd", "scale") else right.dtype
        assert got[name].dtype == dtype
        found = got[name].double()
        if dtype == torch.float8_e4m3fn:
            # What lies between two of its values, 32 apart at most, may be either.
            found = found * got["scale"].double().unsqueeze(-1)
            expected = expected.double() * want.y_scale.double().unsqueeze(-1)
        scale = expected.double().abs().max().clamp(min=1)
        tolerance = max(TOLERANCES[dtype], least_tolerance)
        assert (found - expected.double()).abs().max() / scale <= tolerance, name
