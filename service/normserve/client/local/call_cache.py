"""Caches of known calls, so that a repeated call is not built anew.

Tensors of a repeated call are at the same addresses in shared memory, or outside it: these are copied, if possible
to ranges of earlier copies.  Each client waits for the device and for responses in its own way; the other parts are
here and in `known`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Any

import numpy as np

from normserve.client.calls.api_call import ApiCall
from normserve.client.local.arena import HostArena
from normserve.client.local.array_memory import (
    CudaArrayMemory,
    NumpyArrayMemory,
    SharedArrayMemory,
    TorchArrayMemory,
)
from normserve.client.local.call_messages import MISFIT_STATUS, make_arena_response, make_compute_message
from normserve.client.local.device_arena import DeviceArena
from normserve.client.local.known import CachedCall, CopiedInput, PendingCachedCall, ResultField
from normserve.client.responses.api_errors import make_api_error
from normserve.codec import local_messages as frames
from normserve.codec.local_messages import TensorReference
from normserve.memory.tensors import DType

_MOST_CALLS = 1024

_TIMING = "timing"

_PLAIN = frozenset([int, float, bool, str, type(None)])


Signature = tuple[Hashable, Mapping[str, Any]]
"""The identity of a call: a key, and the tensors that must be copied, by the names of their arguments.

Calls with the same key differ only in the contents of their tensors and the addresses of those that must be copied.
"""


class CallCache:
    """The known calls of one connection with arrays of one kind.

    Attributes:
        calls: the known calls, by their keys.
        find_busy_stream: returns the stream to wait for, if any, before `begin_call`, and again after it if tensors
            were copied.
    """

    def __init__(self, memory: SharedArrayMemory) -> None:
        self._memory = memory
        self._take_all, self._take_at = memory.allocate_all, memory.allocate_at
        self.find_busy_stream = memory.find_busy_stream
        self.calls: dict[Hashable, CachedCall] = {}

    def compute_signature(
        self, build: Callable[..., object], arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> Signature | None:
        """Return the signature of a call; None for a call that cannot be cached."""
        make_key = self._memory.make_reuse_key
        parts: list[Any] = [build]
        elsewhere: dict[str, Any] = {}
        for position, value in enumerate(arguments):
            kind = type(value)
            if kind in _PLAIN:
                parts += (kind, value)
                continue
            key_part = make_key(value) or self._make_sequence_key(value)
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
            key_part = make_key(value) or self._make_sequence_key(value)
            if not key_part:
                return None
            if key_part[0] is None:
                elsewhere[name] = value
            parts += (name, key_part)
        return tuple(parts), elsewhere

    def _make_sequence_key(self, value: Any) -> tuple[Hashable, ...]:
        """Make the key part of a list of names or of tensors in shared memory; return () for anything else."""
        kind = type(value)
        if kind is not list and kind is not tuple:
            return ()
        parts: list[Hashable] = []
        for each in value:
            key_part = (
                (type(each), each) if each is None or type(each) is str else self._memory.make_reuse_key(each)
            )
            if not key_part or key_part[0] is None:
                return ()
            parts.append(key_part)
        return (kind, *parts)

    def begin_call(self, cached_call: CachedCall, elsewhere: Mapping[str, Any]) -> PendingCachedCall | None:
        """Allocate the blocks of a repeated call and copy its inputs; return None where memory is lacking.

        Args: elsewhere: the tensors to copy, as in `Signature`.
        """
        for encoded_call in cached_call.encoded_calls:
            blocks = self._take_at(encoded_call.segment_ranges)
            if blocks is not None:
                break
        else:
            blocks = self._take_all(cached_call.block_sizes)
            if blocks is None:
                return None
            encoded_call = cached_call.encode_at([block.segment_range for block in blocks])
        pending_call = PendingCachedCall(cached_call, blocks, encoded_call)
        if elsewhere:
            pending_call.copy_inputs(elsewhere, self._memory.copy_all)
        return pending_call

    def end_call(
        self,
        key: Hashable,
        pending_call: PendingCachedCall,
        response: frames.LazyLocalResponse,
        api_key: str | None,
    ) -> Any:
        """Return the call's result; None where the response differs from before and the call must be built anew.

        Args: api_key: left out of the text of errors.

        Raises:
            ApiError: the response is an error.
        """
        result = pending_call.make_result(response)
        if result is not None:
            return result
        self.calls.pop(key, None)
        # The results of a layer that was replaced may need other ranges.
        if response.status < 400 or response.status == MISFIT_STATUS:
            return None
        refused = make_arena_response(response, {})
        raise make_api_error(refused.status, refused.headers, bytes(refused.body), api_key)

    def add_call(self, signature: Signature, call: ApiCall[Any], result: Any) -> None:
        """Cache an answered call of an operation."""
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
    """The caches of one connection, one for each kind of arrays."""

    def __init__(self, arena: HostArena) -> None:
        """Args: arena: the arena in host memory."""
        self._arena = arena
        self._numpy = CallCache(NumpyArrayMemory(arena))
        self._torch: CallCache | None = None
        self._cuda: CallCache | None = None

    def get_cache(self, x: object) -> CallCache | None:
        """Return the cache for x's kind of array; None for other values and for device tensors without a cache."""
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
