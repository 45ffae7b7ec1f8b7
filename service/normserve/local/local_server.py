"""The connections of clients on the same host, from accepting to closing."""

import asyncio
import functools
import logging
import socket
from collections.abc import Callable

from normserve.codec.local_messages import LocalResponse, encode_frame
from normserve.errors import ForbiddenError, NormserveError
from normserve.errors.problems import get_status, make_problem_document
from normserve.local.client_segments import ClientSegment
from normserve.local.frame_socket import FrameSocket
from normserve.local.local_services import LocalServices
from normserve.local.local_session import AllowedLocalUsers, PeerProcess
from normserve.local.server_connection import LocalServerConnection
from normserve.socket_readers import has_ended

log = logging.getLogger(__name__)

# Unsent responses of a connection beyond which none of its requests are read.
_MOST_UNSENT = 64
_POLL_S = 0.01
# A client's end is noticed at once, and its requests are ended soon after.
_SWEEP_S = 30.0


class LocalServer:
    """The server of connections from clients on the same host that share memory with it.  Other code accepts
    the sockets; only the event loop's thread may use it.
    """

    def __init__(self, service: LocalServices, users: AllowedLocalUsers, *, frame_s: float, send_s: float) -> None:
        """Args:
        frame_s: seconds after its first byte within which a frame must be complete.
        send_s: seconds within which a client must read a response.
        """
        self._services = service
        self._local_users = users
        self._max_frame_s, self._max_send_s = frame_s, send_s
        self._connections: dict[LocalServerConnection, socket.socket] = {}
        self._orphaned_segments = service.orphaned_segments
        self._sweep_timer: asyncio.TimerHandle | None = None
        # Connections whose clients had gone at the last sweep.
        self._orphaned_connections: set[LocalServerConnection] = set()

    @property
    def connection_count(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def start_connection(self, connected: socket.socket, on_end: Callable[[], None]) -> None:
        """Start to serve a connection, or refuse the client if its user may not connect.  `on_end` is called
        when the connection ends.
        """
        try:
            peer = PeerProcess.from_socket(connected)
            key_name = self._local_users.find_key_name(peer.uid)
        except (ForbiddenError, OSError) as error:
            if isinstance(error, ForbiddenError):
                connected.setblocking(False)
                _send_frame(connected, make_refusal_frame(error))
            connected.close()
            on_end()
            return
        connection = LocalServerConnection(
            self._services, peer, key_name, functools.partial(peer.open_exit_descriptor, connected)
        )
        connection.on_closed = functools.partial(self._finish_connection, connection, connected, on_end)
        self._connections[connection] = connected
        self._schedule_sweep()
        timing = {"frame_s": self._max_frame_s, "send_s": self._max_send_s}
        connection.start(FrameSocket(connected, connection, most_unsent=_MOST_UNSENT, **timing))

    async def close(self, within_s: float) -> None:
        """Wait up to `within_s` seconds for requests in progress, then close all connections.  Clients can still
        use the memory that they have mapped.
        """
        give_up = asyncio.get_running_loop().time() + within_s
        while any(each.is_busy for each in self._connections) and asyncio.get_running_loop().time() < give_up:
            await asyncio.sleep(_POLL_S)
        for connection in tuple(self._connections):
            connection.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        self._orphaned_segments.stop_monitoring()

    def _schedule_sweep(self) -> None:
        """Schedule the next check for connections without a client, unless one is scheduled."""
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_later(_SWEEP_S, self._close_orphaned_connections)

    def _close_orphaned_connections(self) -> None:
        """Close connections whose clients had already ended at the previous check, and schedule the next one.
        Each is logged as a bug, because a client's end should close its connection at once.
        """
        self._sweep_timer = None
        gone = {each for each, connected in self._connections.items() if has_ended(connected.fileno())}
        for connection in gone & self._orphaned_connections:
            log.error("a connection of uid %d outlived its client: please report this", connection.peer.uid)
            connection.close()
        self._orphaned_connections = gone & self._connections.keys()
        if self._connections:
            self._schedule_sweep()

    def _finish_connection(
        self,
        connection: LocalServerConnection,
        connected: socket.socket,
        on_end: Callable[[], None],
        remaining_segments: list[ClientSegment],
    ) -> None:
        """Forget an ended connection, keep its segments until the client's process ends, and call `on_end`."""
        del self._connections[connection]
        # Where nothing is left over, no process need be watched.
        watch = connection.peer.open_exit_descriptor(connected) if remaining_segments else None
        self._orphaned_segments.retain_segments(connection.peer.pid, watch, remaining_segments)
        on_end()


def make_refusal_frame(error: NormserveError) -> bytes:
    """Encode the response to a client whose connection is refused."""
    return encode_frame(0, LocalResponse(status=get_status(error), problem=make_problem_document(error, "")))


def _send_frame(connected: socket.socket, frame: bytes) -> None:
    """Send a frame without waiting; ignore an error, because the connection is closed next."""
    try:
        connected.send(frame)
    except OSError:
        return
