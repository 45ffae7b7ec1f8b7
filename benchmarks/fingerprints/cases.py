"""A case: tensors on the meta device, a call on them, and the policy under which its launches are planned."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from fusednorm.arguments.arrays import Array
from fusednorm.errors import UnsupportedShapeError
from fusednorm.launch.launches import Launch
from fusednorm.policy.batch_invariance import require_batch_invariance
from fusednorm.policy.cooperative_launches import allow_waiting
from fusednorm.tensors.arrays import name_dtype
from fusednorm.tensors.devices import describe_device
from torch import Tensor

SHORT_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
DTYPES = tuple(SHORT_NAMES)


def choose_other_dtype(dtype: torch.dtype) -> torch.dtype:
    """Another dtype that tensors used together with one of `dtype` may have."""
    return torch.bfloat16 if dtype == torch.float32 else torch.float32


@dataclass(slots=True)
class MetaTensors:
    """Tensors of one call, on the meta device, for which plans assume an H200.

    Attributes:
        unaligned: whether each starts one element after a multiple of 16 bytes.
        memories: the memory of each role in the call.
    """

    unaligned: bool = False
    memories: dict[str, Tensor] = field(default_factory=dict)
    _roles: dict[int, str] = field(default_factory=dict)
    _most_elements: int = 0

    def make_tensor(self, role: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with a separate storage."""
        size = torch.Size(shape)
        self.memories[role] = memory = self.allocate(role, size.numel() + self.unaligned, dtype)
        self._roles[_storage_of(memory)] = role
        self._most_elements = max(self._most_elements, size.numel())
        return memory[int(self.unaligned) :].view(size)

    def describe(self, tensor: Tensor | None) -> Any:
        """The description of one of these tensors, or of a view of one; None for None."""
        if tensor is None:
            return None
        return Array(
            self._roles[_storage_of(tensor)],
            name_dtype(tensor.dtype),
            tuple(tensor.shape),
            tensor.stride(),
            describe_device(tensor.device),
            tensor.is_contiguous(),
            tensor.data_ptr() % 16 == 0,
            int(tensor.storage_offset()),
        )

    @property
    def max_elements(self) -> int:
        """The number of elements of the largest tensor."""
        return self._most_elements

    def allocate(self, role: str, count: int, dtype: torch.dtype) -> Tensor:
        """The memory of a new tensor, of which an unaligned one leaves out the first element."""
        return torch.empty(count, dtype=dtype, device="meta")


def _storage_of(tensor: Tensor) -> int:
    """An identifier of the storage of a tensor, unique among living storages."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class FingerprintCase:
    """One call.

    Attributes:
        name: operation, dtype, shape and variant; unique.
        plan: creates tensors and returns the launches of the call.
        may_wait: whether programs may wait for one another.
        batch_invariant: whether bits must not depend on the number of samples.
    """

    name: str
    plan: Callable[[MetaTensors], list[Launch]]
    unaligned: bool = False
    may_wait: bool = True
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """The launches of a case, None if the call is refused, and its tensors."""

    case: FingerprintCase
    launches: list[Launch] | None
    tensors: MetaTensors


def plan_case(case: FingerprintCase, tensors: MetaTensors | None = None) -> PlannedCase:
    """Plan a case under its policy, with `tensors` or with meta tensors."""
    if tensors is None:
        tensors = MetaTensors(case.unaligned)
    with _apply_policy(case):
        try:
            launches = case.plan(tensors)
        except UnsupportedShapeError:
            launches = None
    return PlannedCase(case, launches, tensors)


@contextmanager
def _apply_policy(case: FingerprintCase) -> Iterator[None]:
    """Use the case's policy, and afterwards that of a new process."""
    allow_waiting(case.may_wait)
    require_batch_invariance(case.batch_invariant)
    try:
        yield
    finally:
        allow_waiting(True)
        require_batch_invariance(False)
