"""The tensors of one inference request that lie in regions, or are to be written there."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from normserve.errors import UnusableRegionError
from normserve.http.oip.asked import Asked, Region
from normserve.http.oip.regions.registry import Regions, Span
from normserve.http.oip.regions.transfer import Transfer
from normserve.jobs.job import NormJob
from normserve.jobs.results import results_of
from normserve.memory.host_tensors import HostTensor


@dataclass(frozen=True, slots=True)
class Found:
    """Where a request's tensors lie, by name; what is found stays open, whoever unregisters it."""

    inputs: Mapping[str, Span]
    outputs: Mapping[str, Span]


NONE = Found({}, {})
"""Of a request that names no region."""


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Finds regions for requests, and copies from and to them."""

    regions: Regions
    transfer: Transfer

    def find(self, owner: str | None, asked: Asked) -> Found:
        """The regions that a request names.

        Raises:
            UnusableRegionError: one is not there or has no such part, or two outputs overlap.
        """
        inputs = {
            each.name: self._span(owner, each.source) for each in asked.inputs if isinstance(each.source, Region)
        }
        outputs = {
            each.name: self._span(owner, each.region) for each in asked.outputs or () if each.region is not None
        }
        for (one, first), (other, second) in itertools.combinations(outputs.items(), 2):
            if first.overlaps(second):
                raise UnusableRegionError(f"{one} and {other} would be written over each other")
        return Found(inputs, outputs)

    async def read(self, found: Found) -> dict[str, memoryview]:
        """Copies of the inputs, by name.

        Raises:
            UnusableRegionError: a region has become shorter.
            OverloadedError: there is no memory.
        """
        return dict(zip(found.inputs, await self.transfer.read([*found.inputs.values()]), strict=True))

    async def write(self, found: Found, results: Mapping[str, HostTensor]) -> None:
        """Copy results to where they are wanted.

        Raises:
            UnusableRegionError: a region has become shorter.
            StorageError: there is no memory for one.
        """
        await self.transfer.write(
            [(span, results[name].data) for name, span in found.outputs.items() if name in results]
        )

    def _span(self, owner: str | None, said: Region) -> Span:
        return self.regions.find(owner, said.name, said.offset, said.nbytes)


def require_room(found: Found, job: NormJob) -> None:
    """Say before the work, not after it, that there is too little room for a result.

    Raises:
        UnusableRegionError: its shared_memory_byte_size is less than it has.
    """
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in job.tensors.items()}
    for name, (dtype, shape) in results_of(job.spec, given, job.layer).items():
        nbytes = dtype.itemsize * prod(shape)
        if name in found.outputs and nbytes > found.outputs[name].nbytes:
            raise UnusableRegionError(
                f"{name} has {nbytes} bytes, and its shared_memory_byte_size allows {found.outputs[name].nbytes}"
            )
