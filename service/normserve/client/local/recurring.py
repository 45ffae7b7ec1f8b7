"""Calls that come again with tensors at the same places of shared memory: what they are is found out once.

How to wait for the device and for answers is the clients', each in its own way; all else is here.
"""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

import msgspec
import numpy as np

from normserve.client.answers.failures import api_error
from normserve.client.calls.call import Call
from normserve.client.local.arena import Arena
from normserve.client.local.device import DeviceArena
from normserve.client.local.memories import CudaMemory, Memory, NumpyMemory, Taken, TorchMemory
from normserve.client.local.messages import compute, timing_of, understood
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import Located, Place
from normserve.errors import MalformedPayloadError
from normserve.memory.host_tensors import DType

_MOST_CALLS = 1024

# So many places that a call's results had are taken again, if they are free: the server answers soonest what it has
# been asked word for word, and the next call, which has these results for its tensors, is the same again, too.
_MOST_PLACES = 4

_TIMING = "timing"

_PLAIN = frozenset([int, float, bool, str, type(None)])


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor of a call's result.

    Attributes:
        name: in the API, and of the field that holds it.
        position: of that field.
        make: makes it in a block.
    """

    name: str
    position: int
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[Any], Any]


@dataclass(slots=True)
class Asked:
    """A call with places for its results.

    Attributes:
        places: of each of them.
        content: the message, encoded.
        results: as the last answer that was understood told them, encoded; an answer that says the same is as good.
    """

    places: Sequence[Place]
    content: msgspec.Raw
    results: msgspec.Raw | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """A call that was answered once.

    Attributes:
        message: without places for the results.
        kind: of what the client makes of the answer, a dataclass.
        fields, timing: how many fields that has, and the position of `timing`.
        results: the tensors in it.
        sizes: bytes that each of them needs.
        asked: what was sent, with several places for the results, the last ones at the end.
    """

    message: frames.Message
    kind: Callable[..., Any]
    fields: int
    timing: int
    results: Sequence[_Result]
    sizes: Sequence[int]
    asked: list[Asked] = field(default_factory=list)

    def at(self, places: Sequence[Place]) -> Asked:
        """The call with its results at places where they have not been lately."""
        named = {result.name: place for result, place in zip(self.results, places, strict=True)}
        whole = msgspec.structs.replace(self.message, results=named)
        asked = Asked(places, msgspec.Raw(msgspec.json.encode(whole)))
        if len(self.asked) >= _MOST_PLACES:
            del self.asked[0]
        self.asked.append(asked)
        return asked

    def fits(self, told: frames.Reply) -> bool:
        """Whether an answer's results are what they were before."""
        try:
            located = frames.read_results(told)
        except MalformedPayloadError:
            return False
        found = {name: (each.dtype, each.shape) for name, each in located.items()}
        return found == {result.name: (result.dtype, result.shape) for result in self.results}


class Again:
    """A call that is asked for again: what is sent, and what to make of the answer.  It keeps the results' memory.

    Attributes:
        content: the message, encoded.
    """

    __slots__ = ("_asked", "_blocks", "_fields", "_known", "content")

    def __init__(self, known: Known, blocks: Sequence[Taken], asked: Asked) -> None:
        self._known = known
        self._blocks = blocks
        self._asked = asked
        self._fields: list[Any] = [None] * known.fields
        self.content = asked.content

    def make_results(self) -> None:
        """Make the results' tensors, while the server computes what they hold."""
        made = self._fields
        for result, block in zip(self._known.results, self._blocks, strict=True):
            made[result.position] = result.make(block)

    def result(self, told: frames.Reply) -> Any:
        """The call's result; None where the answer is not what it was before."""
        known = self._known
        if told.status != 200:
            return None
        if told.results != self._asked.results:
            if not known.fits(told):
                return None
            # A copy, because what was read keeps all of the answer.
            self._asked.results = msgspec.Raw(bytes(told.results))
        self._fields[known.timing] = timing_of(told)
        return known.kind(*self._fields)


class Recurring:
    """Those of one connection with arrays of one kind.

    Attributes:
        known: what is known of calls, by their keys: `busy`, and then `begin`, ask for one again.
        busy: what must be waited for before that, if there is anything.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._take_all, self._take_at = memory.take_all, memory.take_at
        self.busy = memory.busy
        self.known: dict[Hashable, Known] = {}

    def key(self, build: Callable[..., object], arguments: Sequence[Any], named: Mapping[str, Any]) -> Hashable:
        """What calls have in common that differ in nothing but what their tensors hold; None of other calls."""
        described = self._memory.described
        parts: list[Hashable] = [build]
        for value in arguments:
            kind = type(value)
            said = (kind, value) if kind in _PLAIN else described(value) or self._several(value)
            if not said:
                return None
            parts.append(said)
        for name, value in named.items():
            if value is not None:
                kind = type(value)
                said = (kind, value) if kind in _PLAIN else described(value) or self._several(value)
                if not said:
                    return None
                parts += (name, said)
        return tuple(parts)

    def _several(self, value: Any) -> Hashable:
        """Of a chain several tensors or names; () of anything else."""
        kind = type(value)
        if kind is not list and kind is not tuple:
            return ()
        parts = []
        for each in value:
            said = (type(each), each) if each is None or type(each) is str else self._memory.described(each)
            if not said:
                return ()
            parts.append(said)
        return (kind, *parts)

    def begin(self, known: Known) -> Again | None:
        """Ask for a call again; None where it needs more memory than there is."""
        for asked in known.asked:
            blocks = self._take_at(asked.places)
            if blocks is not None:
                return Again(known, blocks, asked)
        blocks = self._take_all(known.sizes)
        return None if blocks is None else Again(known, blocks, known.at([block.place for block in blocks]))

    def end(self, key: Hashable, again: Again, told: frames.Reply, api_key: str | None) -> Any:
        """The call's result; None where it is not what it was before, and must be asked for anew.

        Args: api_key: what no error may repeat.

        Raises:
            ApiError: the server refused.
        """
        result = again.result(told)
        if result is not None:
            return result
        self.known.pop(key, None)
        if told.status < 400:
            return None
        refused = understood(told, {})
        raise api_error(refused.status, refused.headers, bytes(refused.body), api_key)

    def learn(self, key: Hashable, call: Call[Any], result: Any) -> None:
        """Remember an operation that was answered."""
        if call.outputs is None or call.tensors is None:
            return
        located = {}
        for name, tensor in call.tensors.items():
            there = self._memory.located(tensor)
            if there is None:
                # The connection has ended, and its arena with it.
                return
            located[name] = Located(*there, tensor.dtype.label, tensor.shape)
        names = [each.name for each in fields(result)]
        results, sizes = [], []
        for position, name in enumerate(names):
            tensor = getattr(result, name)
            if tensor is None or name == _TIMING:
                continue
            dtype, shape = DType(str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape)
            if 0 in shape:
                return
            make = self._memory.maker(dtype, shape)
            results.append(_Result(name, position, dtype.label, shape, make))
            sizes.append(prod(shape) * dtype.itemsize)
        if len(self.known) >= _MOST_CALLS:
            self.known.clear()
        # Not the call, which has its tensors.
        message, timing = compute(call, located, {}), names.index(_TIMING)
        self.known[key] = Known(message, type(result), len(names), timing, results, sizes)


class KindsOfRecurring:
    """The recurring calls of one connection, by the kind of their arrays."""

    def __init__(self, arena: Arena) -> None:
        """Args: arena: in host memory."""
        self._arena = arena
        self._numpy = Recurring(NumpyMemory(arena))
        self._torch: Recurring | None = None
        self._cuda: Recurring | None = None

    def of(self, x: object) -> Recurring | None:
        """Those of the kind that x is; None of no array, and of a tensor on a device before `share_device`."""
        if type(x) is np.ndarray:
            return self._numpy
        torch: Any = sys.modules.get("torch")
        if torch is None or not isinstance(x, torch.Tensor):
            return None
        if x.is_cuda:
            return self._cuda
        if self._torch is None:
            # Only now, because torch is imported only by callers that use it.
            self._torch = Recurring(TorchMemory(self._arena))
        return self._torch

    def share_device(self, arena: DeviceArena) -> None:
        """Tensors in device memory can recur from now on."""
        if self._cuda is None:
            self._cuda = Recurring(CudaMemory(arena))
