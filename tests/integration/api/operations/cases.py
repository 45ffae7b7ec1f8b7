"""Operations to ask for over HTTP, and the oracle's answers in float64."""

from collections.abc import Iterator

import torch
from fusednorm import reference

from tests.integration.harness.wire import SAFETENSORS, packed, unpacked

GROUPS = 4
# Rounding of the result to its own type, and of what was summed in float32 on the way there.
TOLERANCES = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Case:
    """One operation on tensors of one dtype: how it is asked for, and what is right."""

    def __init__(
        self,
        op: str,
        dtype: torch.dtype,
        parameters: torch.dtype | None,
        nhwc: bool = False,
        scale: torch.dtype | None = None,
        shift: torch.dtype | None = None,
        shape: tuple[int, ...] | None = None,
    ):
        self.op, self.nhwc = op, nhwc
        small = (3, 4, 5, 8) if nhwc else (3, 8, 4, 5) if op == "group_norm" else (2, 3, 64)
        self.shape = shape or small
        size = self.shape[1] if op == "group_norm" and not nhwc else self.shape[-1]
        self.x = torch.randn(self.shape).to(dtype)
        self.weight = self.bias = None
        if parameters is not None:
            self.weight = torch.randn(size).to(parameters)
            self.bias = torch.randn(size).to(parameters) if op != "rms_norm" else None
        of_samples = (self.shape[0], size)
        self.scale = None if scale is None else torch.randn(of_samples).to(scale)
        self.shift = None if shift is None else torch.randn(of_samples).to(shift)

    def packed(self, **more: torch.Tensor | None) -> bytes:
        """x, the parameters and what else is to go with them."""
        of_case = {name: getattr(self, name) for name in ("x", "weight", "bias", "scale", "shift")}
        return packed(**of_case, **more)

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
        groups = []
        if self.op == "group_norm":
            groups.append(GROUPS)
            options |= {"scale": self.scale, "shift": self.shift}
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


def post(api, path: str, content: bytes | Iterator[bytes], **query: object) -> dict[str, torch.Tensor]:
    """The tensors of a right answer; an iterator's bytes are sent in chunks."""
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


def default_eps(op: str) -> float:
    return 1e-6 if op == "rms_norm" else 1e-5
