"""Operations whose body a front end receives into the owner's memory, and that are answered directly."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from normserve.admission.callers import ClientIdentity
from normserve.errors import ClientLeftError, NormserveError, RequestTimeoutError
from normserve.http.relay import messages
from normserve.http.relay.direct import OperationServices, PreparedHeader, RelayedOperation
from normserve.http.relay.exchange import FrontEndConnection
from normserve.http.transport.pace import SlowTransferMonitor, TransferProgress
from normserve.jobs.job import RegisteredLayer
from normserve.memory.slabs import SlabPool

HandOver = Callable[[NormserveError, int], None]


class SharedBodyOperation(RelayedOperation):
    """One request under way, from the first byte of its body on.

    Attributes:
        received_bytes: bytes of the body that have come.
        is_complete: all of them have.
    """

    def __init__(
        self,
        parts: OperationServices,
        front_end: FrontEndConnection,
        request: messages.RequestStarted,
        prepared: PreparedHeader,
        caller: ClientIdentity,
        hand_over: HandOver,
    ) -> None:
        """Args: hand_over: has the application answer the request, whose body was cut off after so many bytes."""
        super().__init__(parts, front_end, request, prepared, caller)
        self._began_at = request.began
        self._hand_to_application = hand_over
        self._layer: RegisteredLayer | None = None
        # What the front end writes to: not reused before the front end says that it has stopped.
        self._shared_memory: memoryview | None = None
        self._monitor: SlowTransferMonitor | None = None
        self._failure: NormserveError | None = None
        self.received_bytes = 0
        self.is_complete = False

    def start_receiving(self, announced: int) -> bool:
        """Let the body come; False where the application must see to it, which has not begun then.

        It must where the request is to be refused, and where memory for it takes long to make.
        """
        bodies = self._body_reader
        try:
            self._layer = self.admit_body(announced)
        except NormserveError:
            return False
        assert self.permit is not None
        room = _allocate_body(bodies.slab_pool, announced)
        located = None if room is None else self._front_end.locate_slab(room)
        if located is None:
            self.permit.release()
            return False
        self._shared_memory = room
        self.permit.start_receiving(self, bodies.compute_due_bytes_per_s(announced))
        pace = TransferProgress(
            time.perf_counter(), bodies.max_pause_s, bodies.max_total_s, bodies.min_bytes_per_s, bodies.grace_s
        )
        self._monitor = SlowTransferMonitor(
            asyncio.get_running_loop(), pace, lambda: self.received_bytes, self._abort_slow
        )
        place = located.slab.number, located.offset
        self._front_end.send_message(messages.BodyLocation(self._number, *place, announced))
        return True

    def on_progress(self, nbytes: int) -> None:
        """So many bytes of the body have come to their place."""
        self.received_bytes = nbytes

    def on_message(self, message: Any) -> None:
        """What the front end says about it."""
        match message:
            case messages.BodyReceived() if self._failure is None:
                self._complete_body(message)
            case messages.BodyReceived() | messages.BodyAborted():
                # Nothing is written to its place any more.
                self._shared_memory = None
                self.abort(ClientLeftError("the client left while its body was received"))
                assert self._failure is not None
                self._hand_to_application(self._failure, self.received_bytes)
            case messages.ClientDisconnected() if not self.is_complete:
                # The body's end says so, too.
                pass
            case _:
                super().on_message(message)

    def on_front_end_lost(self) -> None:
        """The front end is gone, and its clients with it."""
        self._stop_monitor()
        if not self.is_complete:
            self.record.error_code = ClientLeftError.code
            self.record.received_bytes = self.received_bytes
        super().on_front_end_lost()

    def abort(self, error: NormserveError) -> None:
        """The rest of the body is not wanted; the application says why, once its place is written to no more."""
        if self._failure is not None:
            return
        self._failure = error
        self._stop_monitor()
        if self.permit is not None:
            self.permit.release()
        if self._shared_memory is not None:
            self._front_end.send_message(messages.BodyStopRequest(self._number))

    def _complete_body(self, message: messages.BodyReceived) -> None:
        """The body is whole."""
        assert self.permit is not None
        assert self._shared_memory is not None
        self._stop_monitor()
        self.received_bytes, self.is_complete = message.nbytes, True
        self.permit.complete_body()
        body, self._shared_memory = self._shared_memory[: message.nbytes], None
        self.compute_body(body, self._layer, message.ended - self._began_at)

    def _abort_slow(self, fault: str) -> None:
        self.abort(RequestTimeoutError(fault))

    def _stop_monitor(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()


def _allocate_body(slabs: SlabPool, nbytes: int) -> memoryview | None:
    """Memory for a body; None where there is none at once."""
    if slabs.source.is_slow:
        return slabs.borrow_idle(nbytes)
    try:
        return slabs.borrow(nbytes)
    except MemoryError:
        return None
