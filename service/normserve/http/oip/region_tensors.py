"""The tensors of an inference request that are read from or written to regions of shared memory.

Tensors in system shared memory are copied from and to slabs; tensors in CUDA memory are not copied.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from normserve.admission.client_identity import ClientIdentity
from normserve.errors import OverloadedError, UnusableRegionError
from normserve.http.oip.inference_request import InferenceRequest, RegionReference
from normserve.http.oip.regions.device_regions import DeviceRegion, DeviceRegionOpener
from normserve.http.oip.regions.file_regions import FileRegion
from normserve.http.oip.regions.region_registry import RegionRange, RegionRegistry
from normserve.jobs.job import NormJob, PassDirection
from normserve.jobs.result_specs import infer_result_specs
from normserve.memory.slabs import SlabPool
from normserve.memory.tensors import HostTensor
from normserve.memory.thread_allocation import make_unretained_on_thread

# A shorter copy takes no longer than a hand-over to another thread.
_LONG_BYTES = 2**20
# One thread copies at a fraction of the memory bandwidth; each piece of this size is worth another thread.
_PIECE_BYTES = 16 * 2**20
_ALIGNMENT = 64

# Results that a kernel may write over an input, if both have exactly the same byte range.
_WRITTEN_OVER = {PassDirection.FORWARD: {"y": "x"}, PassDirection.BACKWARD: {"dx": "x"}}


@dataclass(frozen=True, slots=True)
class RegionTransfer:
    """Copies data between clients' system shared memory and the server's slabs; other threads make long copies."""

    slab_pool: SlabPool

    async def read_ranges(self, spans: Sequence[RegionRange]) -> list[memoryview]:
        """Copy ranges of clients' regions into one slab; return a view of the slab for each range.

        Nothing else writes to the views.  The caller's permit covers their bytes.

        Raises:
            UnusableRegionError: a file is too short.
            OverloadedError: there is no memory.
        """
        starts, end = [], 0
        for span in spans:
            starts.append(end)
            end += -(-span.nbytes // _ALIGNMENT) * _ALIGNMENT
        slab = await self._borrow_slab(end)
        places = [slab[start : start + span.nbytes] for start, span in zip(starts, spans, strict=True)]
        if end <= _LONG_BYTES:
            for span, place in zip(spans, places, strict=True):
                _get_file_region(span).read(span.offset, place)
            return places
        pieces = [
            asyncio.to_thread(_get_file_region(span).read, span.offset + start, place[start : start + _PIECE_BYTES])
            for span, place in zip(spans, places, strict=True)
            for start in range(0, span.nbytes, _PIECE_BYTES)
        ]
        await asyncio.gather(*pieces)
        return places

    async def write_ranges(self, results: Sequence[tuple[RegionRange, memoryview]]) -> None:
        """Copy results into ranges of regions, each from the beginning of its range.

        Raises:
            UnusableRegionError: a file is too short.
            StorageError: there is no memory for a file.
        """
        if sum([len(data) for _, data in results]) <= _LONG_BYTES:
            _write_results(results)
        else:
            await asyncio.to_thread(_write_results, results)

    async def _borrow_slab(self, nbytes: int) -> memoryview:
        """Borrow a slab; a long one is allocated on another thread if that is slow.

        Raises:
            OverloadedError: there is no memory.
        """
        try:
            if not self.slab_pool.source.is_slow or nbytes < _LONG_BYTES:
                return self.slab_pool.borrow(nbytes)
            idle = self.slab_pool.borrow_idle(nbytes)
            return await make_unretained_on_thread(self.slab_pool.borrow, nbytes) if idle is None else idle
        except MemoryError:
            raise OverloadedError(f"there is no memory for tensors of {nbytes} bytes now") from None


def _write_results(results: Sequence[tuple[RegionRange, memoryview]]) -> None:
    for span, data in results:
        _get_file_region(span).write(span.offset, data)


@dataclass(frozen=True, slots=True)
class RegionBindings:
    """The memory regions that a request names for its tensors, by tensor name.

    They stay open during the request even if they are unregistered.

    Attributes:
        is_on_device: whether all inputs and all result buffers are in regions of CUDA memory.
    """

    inputs: Mapping[str, RegionRange]
    outputs: Mapping[str, RegionRange]
    is_on_device: bool = False


NONE = RegionBindings({}, {})
"""The bindings of a request that names no region."""


@dataclass(frozen=True, slots=True)
class RegionTensorAccess:
    """Access to tensors that a request has in registered memory regions instead of its body.

    Tensors in system shared memory are copied; tensors in CUDA memory are used where they are.
    """

    regions: RegionRegistry
    transfer: RegionTransfer
    device_regions: DeviceRegionOpener

    def bind_regions(self, caller: ClientIdentity, request: InferenceRequest) -> RegionBindings:
        """Find the regions that a request names, and check that its tensors may use them.

        Raises:
            UnusableRegionError: a region is missing or too short, two outputs overlap, or only some of the
                tensors are in CUDA memory.
            ForbiddenError: this client may not use CUDA memory.
        """
        owner = caller.key
        inputs = {
            each.name: self._find_range(owner, each.source)
            for each in request.inputs
            if isinstance(each.source, RegionReference)
        }
        outputs = {
            each.name: self._find_range(owner, each.region)
            for each in request.outputs or ()
            if each.region is not None
        }
        for (one, first), (other, second) in itertools.combinations(outputs.items(), 2):
            if first.has_overlap(second):
                raise UnusableRegionError(f"{one} and {other} would be written over each other")
        are_on_device = [isinstance(each.region, DeviceRegion) for each in (*inputs.values(), *outputs.values())]
        if not any(are_on_device):
            return RegionBindings(inputs, outputs)
        self.device_regions.require_local_client(caller)
        elsewhere = len(request.inputs) - len(inputs) + len(request.outputs or ()) - len(outputs)
        if elsewhere or not outputs or not all(are_on_device):
            raise UnusableRegionError(
                "inputs and outputs of a request must all be in regions of CUDA memory or none of them, and all"
                " outputs must be named"
            )
        return RegionBindings(inputs, outputs, is_on_device=True)

    async def read_inputs(self, bindings: RegionBindings) -> dict[str, memoryview]:
        """Return the inputs in regions by name, as copies of system shared memory or as views of CUDA memory.

        Raises:
            UnusableRegionError: a region's file has become shorter.
            OverloadedError: there is no memory.
        """
        if bindings.is_on_device:
            return {name: _view_device_range(span) for name, span in bindings.inputs.items()}
        return dict(zip(bindings.inputs, await self.transfer.read_ranges([*bindings.inputs.values()]), strict=True))

    async def write_outputs(self, bindings: RegionBindings, results: Mapping[str, HostTensor]) -> None:
        """Copy results into the regions that the request names for them.

        Nothing is copied to regions of CUDA memory: the kernel has written its results there.

        Raises:
            UnusableRegionError: a region's file has become shorter.
            StorageError: there is no memory for a region.
        """
        if not bindings.is_on_device:
            await self.transfer.write_ranges(
                [(span, results[name].data) for name, span in bindings.outputs.items() if name in results]
            )

    def _find_range(self, owner: str | None, reference: RegionReference) -> RegionRange:
        return self.regions.find_range(owner, reference.name, reference.offset, reference.nbytes)


def check_and_assign_result_buffers(bindings: RegionBindings, job: NormJob) -> NormJob:
    """Check that the results fit into their regions; return the job with its result buffers.

    The buffers are in regions of CUDA memory, to which the kernel writes directly.  A job for other
    regions is returned unchanged, and its results are copied later.  The check precedes the
    computation, so that nothing is computed in vain.

    Raises:
        UnusableRegionError: a region is too small for a result; or, in CUDA memory, a result has no
            region or would overwrite a tensor that is still read.
    """
    results = _count_result_bytes(job)
    for name, nbytes in results.items():
        if name in bindings.outputs and nbytes > bindings.outputs[name].nbytes:
            raise UnusableRegionError(
                f"{name} has {nbytes} bytes, and its shared_memory_byte_size allows {bindings.outputs[name].nbytes}"
            )
    if not bindings.is_on_device:
        return job
    is_over = False
    over = _WRITTEN_OVER[job.spec.direction]
    for name, nbytes in results.items():
        if name not in bindings.outputs:
            raise UnusableRegionError(
                f"with tensors in CUDA memory each output must have a region, {name} has none"
            )
        span = bindings.outputs[name]._replace(nbytes=nbytes)
        for other, theirs in bindings.inputs.items():
            if over.get(name) == other and theirs == span:
                is_over = True
            elif span.has_overlap(theirs):
                raise UnusableRegionError(f"{name} would be written over {other}, which is still read")
    places = {name: _view_device_range(span) for name, span in bindings.outputs.items() if name in results}
    return NormJob(job.spec, job.tensors, job.layer, is_over, places)


def _count_result_bytes(job: NormJob) -> dict[str, int]:
    """Return the number of bytes of each result of a job, by name."""
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in job.tensors.items()}
    results = infer_result_specs(job.spec, given, job.layer)
    return {name: dtype.itemsize * prod(shape) for name, (dtype, shape) in results.items()}


def _get_file_region(span: RegionRange) -> FileRegion:
    assert isinstance(span.region, FileRegion)
    return span.region


def _view_device_range(span: RegionRange) -> memoryview:
    assert isinstance(span.region, DeviceRegion)
    return span.region.get_view(span.offset, span.nbytes)
