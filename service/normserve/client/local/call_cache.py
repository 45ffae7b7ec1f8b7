"""Caches of known calls, which are repeated from a cached message without being built anew.

Tensors of a repeated call are at the same addresses in shared memory, or outside shared memory.  Tensors outside
are copied, if possible to ranges of earlier copies.  Each client waits for the device and for responses in its own
way; all other steps of a repeated call are here.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

import msgspec
import numpy as np

from normserve.client.calls.api_call import ApiCall
from normserve.client.local.allocator import HostArena
from normserve.client.local.array_memory import (
    AllocatedBlock,
    CudaArrayMemory,
    NumpyArrayMemory,
    SharedArrayMemory,
    TorchArrayMemory,
)
from normserve.client.local.call_messages import (
    MISFIT_STATUS,
    make_arena_response,
    make_compute_message,
    make_timing,
)
from normserve.client.local.device_arena import DeviceArena
from normserve.client.responses.api_errors import make_api_error
from normserve.codec import local_messages as frames
from normserve.codec.local_messages import SegmentRange, TensorReference
from normserve.errors import MalformedPayloadError
from normserve.memory.tensors import DType

# So many ranges that a call had for copies and results are allocated again, if they are free: the server answers
# a request fastest that has the same bytes as an earlier one, and the next call, whose inputs are these results, is
# the same, too.
_MOST_PLACES = 4

# Of encoded results: those of a call have some hundred bytes, unless its server fills them up.
_MAX_CACHED_BYTES = 4096

_MOST_CALLS = 1024

_TIMING = "timing"

_PLAIN = frozenset([int, float, bool, str, type(None)])


@dataclass(frozen=True, slots=True)
class CopiedInput:
    """The description of a tensor that each repetition of a cached call copies into shared memory.

    Attributes:
        name: the tensor's name in the API.
        make_copy_target: as `SharedArrayMemory.make_copy_target` of a range.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make_copy_target: Callable[[SegmentRange], Any]

    def make_reference(self, place: SegmentRange) -> TensorReference:
        return TensorReference(place.segment, place.offset, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class ResultField:
    """The description of one tensor in the result of a cached call.

    Attributes:
        name: the tensor's name in the API, and that of the result's field.
        field_index: the position of that field.
        make_array: makes the tensor in a block.
    """

    name: str
    field_index: int
    dtype: str
    shape: tuple[int, ...]
    make_array: Callable[[Any], Any]


@dataclass(slots=True)
class EncodedCall:
    """The message of a cached call, encoded with certain memory ranges for its copied inputs and its results.

    Attributes:
        segment_ranges: the ranges of the copies, then those of the results.
        content: the message, encoded.
        copy_targets: the targets of the copies.
        encoded_results: the encoded results of the last valid response; a response with the same bytes is
            valid, too.
    """

    segment_ranges: Sequence[SegmentRange]
    content: msgspec.Raw
    copy_targets: Sequence[Any]
    encoded_results: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True)
class CachedCall:
    """The message of an answered call and the layout of its result, from which the call can be repeated.

    Attributes:
        message: without copied tensors, and without ranges for the results.
        result_type: the dataclass of the call's result.
        field_count, timing_index: how many fields the result has, and the position of `timing` among them.
        copied_inputs: the tensors that are copied.
        results: the tensors in the result.
        block_sizes: bytes of each copy, then of each result.
        encoded_calls: the call as sent with different ranges, the newest at the end.
    """

    message: frames.ComputeMessage
    result_type: Callable[..., Any]
    field_count: int
    timing_index: int
    copied_inputs: Sequence[CopiedInput]
    results: Sequence[ResultField]
    block_sizes: Sequence[int]
    encoded_calls: list[EncodedCall] = field(default_factory=list)

    def encode_and_store_at(self, places: Sequence[SegmentRange]) -> EncodedCall:
        """Encode the message for these memory ranges of copied inputs and results.  Store the encoded message for
        repetitions, and return it.

        Only the newest few encoded messages are kept.

        Args: places: the ranges of the copies, then those of the results.
        """
        count = len(self.copied_inputs)
        copies = {
            each.name: each.make_reference(place)
            for each, place in zip(self.copied_inputs, places[:count], strict=True)
        }
        named = {result.name: place for result, place in zip(self.results, places[count:], strict=True)}
        tensors = self.message.tensors | copies
        message = msgspec.structs.replace(self.message, tensors=tensors, results=named)
        targets = [
            copied.make_copy_target(place) for copied, place in zip(self.copied_inputs, places[:count], strict=True)
        ]
        encoded_call = EncodedCall(places, msgspec.Raw(msgspec.json.encode(message)), targets)
        if len(self.encoded_calls) >= _MOST_PLACES:
            del self.encoded_calls[0]
        self.encoded_calls.append(encoded_call)
        return encoded_call

    def has_same_results(self, response: frames.LazyLocalResponse) -> bool:
        """Return whether the results in a response have the cached names, dtypes and shapes."""
        try:
            located = frames.decode_results(response)
        except MalformedPayloadError:
            return False
        found = {name: (each.dtype, each.shape) for name, each in located.items()}
        return found == {result.name: (result.dtype, result.shape) for result in self.results}


class PendingCachedCall:
    """A repetition of a cached call, from its preparation to its result.  It keeps the memory of the copied inputs
    and the results allocated.

    Attributes:
        content: the message, encoded.
    """

    __slots__ = ("_blocks", "_call", "_encoded_call", "_fields", "content")

    def __init__(self, call: CachedCall, blocks: Sequence[AllocatedBlock], encoded_call: EncodedCall) -> None:
        self._call = call
        self._blocks = blocks
        self._encoded_call = encoded_call
        self._fields: list[Any] = [None] * call.field_count
        self.content = encoded_call.content

    def copy_inputs(
        self, outside_tensors: Mapping[str, Any], copy: Callable[[Sequence[Any], Sequence[Any]], None]
    ) -> None:
        """Copy the tensors that are outside shared memory to their ranges in shared memory.

        Args:
            outside_tensors: those tensors, by name.
            copy: as `SharedArrayMemory.copy_or_enqueue_all`.
        """
        copy(self._encoded_call.copy_targets, [outside_tensors[copied.name] for copied in self._call.copied_inputs])

    def make_result_arrays(self) -> None:
        """Make the arrays of the result over memory to which the server may not have written the results yet."""
        made, call, blocks = self._fields, self._call, self._blocks
        if call.copied_inputs:
            blocks = blocks[len(call.copied_inputs) :]
        for result, block in zip(call.results, blocks, strict=True):
            made[result.field_index] = result.make_array(block)

    def try_make_result(self, response: frames.LazyLocalResponse) -> Any:
        """Return the call's result.  Return None if the response is an error, or its tensors do not have the cached
        names, dtypes and shapes.
        """
        call = self._call
        if response.status != 200:
            return None
        if response.results != self._encoded_call.encoded_results:
            if not call.has_same_results(response):
                return None
            # A copy, because the raw results keep the entire response.
            results = bytes(response.results)
            if len(results) <= _MAX_CACHED_BYTES:
                self._encoded_call.encoded_results = msgspec.Raw(results)
        self._fields[call.timing_index] = make_timing(response)
        return call.result_type(*self._fields)


Signature = tuple[Hashable, Mapping[str, Any]]
"""The identity of a call: a key, and the tensors that must be copied, by the names of their arguments.

Calls with the same key differ only in the contents of their tensors and the addresses of those that must be copied.
"""


class CallCache:
    """A cache of one connection's encoded requests.  A call that equals an earlier one is sent from the cache,
    without being encoded again.

    There is one cache for each kind of arrays: numpy arrays, torch CPU tensors and CUDA tensors.

    Attributes:
        calls: the cached calls, by their keys.
        find_busy_stream: returns the stream to wait for, if any, before `try_prepare_call`, and again after it if
            tensors were copied.
    """

    def __init__(self, memory: SharedArrayMemory) -> None:
        self._memory = memory
        self._take_all, self._take_at = memory.allocate_all, memory.allocate_at
        self.find_busy_stream = memory.find_busy_stream
        self.calls: dict[Hashable, CachedCall] = {}

    def compute_signature(
        self, build: Callable[..., object], arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> Signature | None:
        """Return the key that identifies equal calls, and the tensors that must be copied into shared memory.
        Return None if the call cannot be cached.

        It can be cached if each argument is a plain value, an array of this cache's kind, or a list of names or
        of arrays in shared memory.

        Args:
            build: builds the operation's `ApiCall`.
            arguments, named: the arguments of `build`, by position and by name.
        """
        make_key = self._memory.make_signature_part
        parts: list[Any] = [build]
        elsewhere: dict[str, Any] = {}
        for position, value in enumerate(arguments):
            kind = type(value)
            if kind in _PLAIN:
                parts += (kind, value)
                continue
            key_part = make_key(value) or self._make_list_signature_part(value)
            if not key_part:
                return None
            if key_part[0] is None:
                elsewhere[_get_parameter_name(build, position)] = value
            parts.append(key_part)
        for name, value in named.items():
            if value is None:
                continue
            kind = type(value)
            if kind in _PLAIN:
                parts += (name, kind, value)
                continue
            key_part = make_key(value) or self._make_list_signature_part(value)
            if not key_part:
                return None
            if key_part[0] is None:
                elsewhere[name] = value
            parts += (name, key_part)
        return tuple(parts), elsewhere

    def _make_list_signature_part(self, value: Any) -> tuple[Hashable, ...]:
        """Return the part of a call's key for a list of names, or of arrays in shared memory; return ()
        otherwise.
        """
        kind = type(value)
        if kind is not list and kind is not tuple:
            return ()
        parts: list[Hashable] = []
        for each in value:
            key_part = (
                (type(each), each) if each is None or type(each) is str else self._memory.make_signature_part(each)
            )
            if not key_part or key_part[0] is None:
                return ()
            parts.append(key_part)
        return (kind, *parts)

    def try_prepare_call(
        self, cached_call: CachedCall, outside_tensors: Mapping[str, Any]
    ) -> PendingCachedCall | None:
        """Allocate memory for a repetition of a cached call, and copy the inputs that are outside shared memory.
        Return the pending call, or None if memory is lacking.

        Ranges of earlier repetitions are tried first, because a message with those is already encoded.  Nothing
        is sent here.

        Args: outside_tensors: the tensors to copy, as in `Signature`.
        """
        for encoded_call in cached_call.encoded_calls:
            blocks = self._take_at(encoded_call.segment_ranges)
            if blocks is not None:
                break
        else:
            blocks = self._take_all(cached_call.block_sizes)
            if blocks is None:
                return None
            encoded_call = cached_call.encode_and_store_at([block.segment_range for block in blocks])
        pending_call = PendingCachedCall(cached_call, blocks, encoded_call)
        if outside_tensors:
            pending_call.copy_inputs(outside_tensors, self._memory.copy_or_enqueue_all)
        return pending_call

    def try_finish_call(
        self,
        key: Hashable,
        pending_call: PendingCachedCall,
        response: frames.LazyLocalResponse,
        api_key: str | None,
    ) -> Any:
        """Return the result in the response to a repeated call.  Return None if its tensors do not have the cached
        names, dtypes and shapes.

        None is returned, too, if the server refuses the message because its memory ranges no longer fit.

        In both cases the call is removed from the cache, and the caller must build and send it.

        Args: api_key: left out of the text of errors.

        Raises:
            ApiError: the response is an error.
        """
        result = pending_call.try_make_result(response)
        if result is not None:
            return result
        self.calls.pop(key, None)
        # The results of a layer that was replaced may need other ranges.
        if response.status < 400 or response.status == MISFIT_STATUS:
            return None
        refused = make_arena_response(response, {})
        raise make_api_error(refused.status, refused.headers, bytes(refused.body), api_key)

    def try_add_call(self, signature: Signature, call: ApiCall[Any], result: Any) -> None:
        """Store an answered call, so that an equal call can be repeated from its message.

        A call is not stored if it is no operation, has a result without elements, or was sent over a connection
        that has ended.
        """
        key, elsewhere = signature
        if call.expected_results is None or call.tensors is None or not elsewhere.keys() <= call.tensors.keys():
            return
        located: dict[str, TensorReference] = {}
        copied: list[CopiedInput] = []
        sizes = []
        for name, tensor in call.tensors.items():
            if name in elsewhere:
                target = functools.partial(self._memory.make_copy_target, tensor.dtype, tensor.shape)
                copied.append(CopiedInput(name, tensor.dtype.label, tensor.shape, target))
                sizes.append(tensor.nbytes)
                continue
            there = self._memory.locate(tensor)
            if there is None:
                # The connection has ended, and its arena with it.
                return
            located[name] = TensorReference(*there, tensor.dtype.label, tensor.shape)
        names = [each.name for each in fields(result)]
        results = []
        for position, name in enumerate(names):
            tensor = getattr(result, name)
            if tensor is None or name == _TIMING:
                continue
            dtype, shape = DType(str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape)
            if 0 in shape:
                return
            results.append(
                ResultField(name, position, dtype.label, shape, self._memory.make_array_factory(dtype, shape))
            )
            sizes.append(prod(shape) * dtype.itemsize)
        if len(self.calls) >= _MOST_CALLS:
            self.calls.clear()
        # Not the call, which has its tensors.
        message, timing = make_compute_message(call, located, {}), names.index(_TIMING)
        self.calls[key] = CachedCall(message, type(result), len(names), timing, copied, results, sizes)


@functools.cache
def _get_parameter_name(build: Callable[..., object], position: int) -> str:
    """Return the name of a method's positional parameter; "" where there is none at the position."""
    names = list(inspect.signature(build).parameters)
    return names[position] if position < len(names) else ""


class CallCaches:
    """The call caches of one connection: for numpy arrays, for torch CPU tensors and for CUDA tensors."""

    def __init__(self, arena: HostArena) -> None:
        """Args: arena: the arena in host memory."""
        self._arena = arena
        self._numpy = CallCache(NumpyArrayMemory(arena))
        self._torch: CallCache | None = None
        self._cuda: CallCache | None = None

    def get_cache(self, x: object) -> CallCache | None:
        """Return the cache for arrays of x's kind; None for other values and for CUDA tensors without a cache."""
        if type(x) is np.ndarray:
            return self._numpy
        torch: Any = sys.modules.get("torch")
        if torch is None or not isinstance(x, torch.Tensor):
            return None
        if x.is_cuda:
            return self._cuda
        if self._torch is None:
            # Only now, because torch is imported only by callers that use it.
            self._torch = CallCache(TorchArrayMemory(self._arena))
        return self._torch

    def add_device_cache(self, arena: DeviceArena) -> None:
        """Add a cache for tensors in device memory, unless there is one."""
        if self._cuda is None:
            self._cuda = CallCache(CudaArrayMemory(arena))
