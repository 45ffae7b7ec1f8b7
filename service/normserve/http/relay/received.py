"""Operations whose body a front end receives into the owner's memory, and that are answered directly."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from normserve.admission.client_identity import ClientIdentity
from normserve.errors import ClientLeftError, NormserveError, RequestTimeoutError
from normserve.http.relay import relay_messages
from normserve.http.relay.exchange import FrontEndConnection
from normserve.http.relay.relayed_operations import OperationServices, PreparedHeader, RelayedOperation
from normserve.http.transport.transfer_progress import SlowTransferMonitor, TransferProgress
from normserve.jobs.job import RegisteredLayer
from normserve.memory.slabs import SlabPool

HandOver = Callable[[NormserveError, int], None]


class SharedBodyOperation(RelayedOperation):
    """One request in progress, from the first byte of its body on.

    Attributes:
        received_bytes: the bytes of the body that have been received.
        is_complete: whether the body has been received completely.
    """

    def __init__(
        self,
        parts: OperationServices,
        front_end: FrontEndConnection,
        request: relay_messages.RequestStarted,
        prepared: PreparedHeader,
        caller: ClientIdentity,
        hand_over: HandOver,
    ) -> None:
        """Args: hand_over: has the application answer an aborted request, by its error and the received bytes."""
        super().__init__(parts, front_end, request, prepared, caller)
        self._began_at = request.began
        self._hand_to_application = hand_over
        self._layer: RegisteredLayer | None = None
        # The range that the front end writes to: not reused before the front end reports that it has stopped.
        self._shared_memory: memoryview | None = None
        self._monitor: SlowTransferMonitor | None = None
        self._failure: NormserveError | None = None
        self.received_bytes = 0
        self.is_complete = False

    def start_receiving(self, announced: int) -> bool:
        """Start to receive the body; return False, with nothing begun, if the application must handle the request.

        The application handles requests that must be refused, and bodies whose memory takes long to allocate.
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
        self._front_end.send_message(relay_messages.BodyIntoSlabRequest(self._number, *place, announced))
        return True

    def on_progress(self, nbytes: int) -> None:
        """Record that the body's first `nbytes` are in its slab."""
        self.received_bytes = nbytes

    def on_message(self, message: Any) -> None:
        """Handle a message of the front end about this request."""
        match message:
            case relay_messages.BodyReceived() if self._failure is None:
                self._complete_body(message)
            case relay_messages.BodyReceived() | relay_messages.BodyAborted():
                # The front end no longer writes to the slab.
                self._shared_memory = None
                self.abort(ClientLeftError("the client left while its body was received"))
                assert self._failure is not None
                self._hand_to_application(self._failure, self.received_bytes)
            case relay_messages.ClientDisconnected() if not self.is_complete:
                # `BodyAborted` or `BodyReceived` follows.
                pass
            case _:
                super().on_message(message)

    def on_front_end_lost(self) -> None:
        """Cancel the request: its front end, and with it the client's connection, has ended."""
        self._stop_monitor()
        if not self.is_complete:
            self.record.error_code = ClientLeftError.code
            self.record.received_bytes = self.received_bytes
        super().on_front_end_lost()

    def abort(self, error: NormserveError) -> None:
        """Stop the reception; the application answers with `error` once the front end has stopped writing."""
        if self._failure is not None:
            return
        self._failure = error
        self._stop_monitor()
        if self.permit is not None:
            self.permit.release()
        if self._shared_memory is not None:
            self._front_end.send_message(relay_messages.BodyStopRequest(self._number))

    def _complete_body(self, message: relay_messages.BodyReceived) -> None:
        """Compute the complete body; its permit can no longer be revoked."""
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
    """Return memory for a body; None if none is available at once."""
    if slabs.source.is_slow:
        return slabs.borrow_idle(nbytes)
    try:
        return slabs.borrow(nbytes)
    except MemoryError:
        return None
