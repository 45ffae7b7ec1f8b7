"""Calls that come again: what they are is found out once.

A call's tensors lie at the same places of shared memory as before, or elsewhere: these are copied, if possible to
where others like them were copied before.  How to wait for the device and for answers is the clients', each in its
own way; all else is here and in `known`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Any

import numpy as np

from normserve.client.answers.failures import make_api_error
from normserve.client.calls.call import ApiCall
from normserve.client.local.arena import HostArena
from normserve.client.local.device import DeviceArena
from normserve.client.local.known import CachedCall, CopiedInput, PendingCachedCall, ResultField
from normserve.client.local.memories import CudaArrayMemory, NumpyArrayMemory, SharedArrayMemory, TorchArrayMemory
from normserve.client.local.messages import make_arena_response, make_compute_message
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import TensorReference
from normserve.memory.host_tensors import DType

_MOST_CALLS = 1024

_TIMING = "timing"

_PLAIN = frozenset([int, float, bool, str, type(None)])


Signature = tuple[Hashable, Mapping[str, Any]]
"""What a call is: a key, and by the names of their arguments the tensors that must be copied.

Calls of the same key differ in nothing but what their tensors hold, and where those lie that must be copied.
"""


class CallCache:
    """Those of one connection with arrays of one kind.

    Attributes:
        calls: what is known of calls, by their keys.
        find_busy_stream: what must be waited for before `begin_call` asks for one again, and once more if anything
            was copied, if there is anything.
    """

    def __init__(self, memory: SharedArrayMemory) -> None:
        self._memory = memory
        self._take_all, self._take_at = memory.allocate_all, memory.allocate_at
        self.find_busy_stream = memory.find_busy_stream
        self.calls: dict[Hashable, CachedCall] = {}

    def compute_signature(
        self, build: Callable[..., object], arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> Signature | None:
        """What a call is; None of one that is not known again."""
        described = self._memory.describe
        parts: list[Any] = [build]
        elsewhere: dict[str, Any] = {}
        for position, value in enumerate(arguments):
            kind = type(value)
            if kind in _PLAIN:
                parts += (kind, value)
                continue
            said = described(value) or self._describe_sequence(value)
            if not said:
                return None
            if said[0] is None:
                elsewhere[_get_parameter_name(build, position)] = value
            parts.append(said)
        for name, value in named.items():
            if value is None:
                continue
            kind = type(value)
            if kind in _PLAIN:
                parts += (name, kind, value)
                continue
            said = described(value) or self._describe_sequence(value)
            if not said:
                return None
            if said[0] is None:
                elsewhere[name] = value
            parts += (name, said)
        return tuple(parts), elsewhere

    def _describe_sequence(self, value: Any) -> tuple[Hashable, ...]:
        """Of a chain several tensors in shared memory, or names; () of anything else."""
        kind = type(value)
        if kind is not list and kind is not tuple:
            return ()
        parts: list[Hashable] = []
        for each in value:
            said = (type(each), each) if each is None or type(each) is str else self._memory.describe(each)
            if not said or said[0] is None:
                return ()
            parts.append(said)
        return (kind, *parts)

    def begin_call(self, known: CachedCall, elsewhere: Mapping[str, Any]) -> PendingCachedCall | None:
        """Ask for a call again; None where it needs more memory than there is.

        Args: elsewhere: as of `Signature`; copied.
        """
        for asked in known.encoded_calls:
            blocks = self._take_at(asked.segment_ranges)
            if blocks is not None:
                break
        else:
            blocks = self._take_all(known.block_sizes)
            if blocks is None:
                return None
            asked = known.encode_at([block.segment_range for block in blocks])
        again = PendingCachedCall(known, blocks, asked)
        if elsewhere:
            again.copy_inputs(elsewhere, self._memory.copy_all)
        return again

    def end_call(
        self, key: Hashable, again: PendingCachedCall, told: frames.LazyLocalResponse, api_key: str | None
    ) -> Any:
        """The call's result; None where it is not what it was before, and must be asked for anew.

        Args: api_key: what no error may repeat.

        Raises:
            ApiError: the server refused.
        """
        result = again.make_result(told)
        if result is not None:
            return result
        self.calls.pop(key, None)
        if told.status < 400:
            return None
        refused = make_arena_response(told, {})
        raise make_api_error(refused.status, refused.headers, bytes(refused.body), api_key)

    def add_call(self, signature: Signature, call: ApiCall[Any], result: Any) -> None:
        """Remember an operation that was answered."""
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
    """Of a method's argument; "" where it has none there."""
    names = list(inspect.signature(build).parameters)
    return names[position] if position < len(names) else ""


class CallCaches:
    """The recurring calls of one connection, by the kind of their arrays."""

    def __init__(self, arena: HostArena) -> None:
        """Args: arena: in host memory."""
        self._arena = arena
        self._numpy = CallCache(NumpyArrayMemory(arena))
        self._torch: CallCache | None = None
        self._cuda: CallCache | None = None

    def get_cache(self, x: object) -> CallCache | None:
        """Those of the kind that x is; None of no array, and of a tensor on a device before `add_device_cache`."""
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
        """Tensors in device memory can recur from now on."""
        if self._cuda is None:
            self._cuda = CallCache(CudaArrayMemory(arena))
