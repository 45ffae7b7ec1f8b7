"""The functions of a driver that a replayer calls: launches end when a test says so."""

import ctypes
import itertools
from collections.abc import Callable

NOT_READY = 600

_Handle = ctypes.c_void_p


class FakeDriver:
    """Launches end in their order, whatever their streams are.

    Attributes:
        launched: graphs, in their order.
        ends_at_once: launches end as soon as they are launched.
        codes: by a function's name, what it returns from now on in place of success.
        slow: streams whose launches do not end.
        elapsed_ms: from the first of two events to the second, of an event that is no launch's own.
        on_launch: called with each graph.
    """

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.ends_at_once = True
        self.codes: dict[str, int] = {}
        self.slow: set[int] = set()
        self.elapsed_ms: dict[int, float] = {}
        self.on_launch: Callable[[int], None] = lambda graph: None
        self.events = 0
        self._ended = 0
        self._numbers = itertools.count(1)
        # How many launches must have ended for each event to be over.
        self._after: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        self._functions = {
            "graph_launch": ctypes.CFUNCTYPE(ctypes.c_int, _Handle, _Handle)(self._launch),
            "event_create": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Handle), ctypes.c_uint)(self._create),
            "event_record": ctypes.CFUNCTYPE(ctypes.c_int, _Handle, _Handle)(self._record),
            "event_query": ctypes.CFUNCTYPE(ctypes.c_int, _Handle)(self._query),
            "event_elapsed": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_float), _Handle, _Handle)(
                self._elapsed
            ),
        }

    def addresses(self) -> dict[str, int]:
        """As `normserve.backends.cuda.replayer.driver.find_function_addresses`."""
        return {name: ctypes.cast(each, _Handle).value or 0 for name, each in self._functions.items()}

    def end(self, launches: int = 1) -> None:
        """The next launches have ended."""
        self._ended += launches

    def _launch(self, graph, stream):
        if code := self.codes.get("graph_launch", 0):
            return code
        self.launched.append(graph)
        self.on_launch(graph)
        if self.ends_at_once:
            self._ended = len(self.launched)
        return 0

    def _create(self, event, flags):
        self.events += 1
        event[0] = next(self._numbers)
        return self.codes.get("event_create", 0)

    def _record(self, event, stream):
        self._after[event] = len(self.launched)
        self._streams[event] = stream
        return self.codes.get("event_record", 0)

    def _query(self, event):
        has_ended = self._ended >= self._after[event] and self._streams[event] not in self.slow
        return self.codes.get("event_query", 0 if has_ended else NOT_READY)

    def _elapsed(self, milliseconds, began, ended):
        milliseconds[0] = self.elapsed_ms.get(ended, 0.25)
        return self.codes.get("event_elapsed", 0)
