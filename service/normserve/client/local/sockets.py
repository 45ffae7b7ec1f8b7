"""Reception from clients' sockets; the blocking client polls for a response if the last one arrived quickly."""

import os
import socket
import time
from typing import Any

from normserve.codec.framing import compute_ancillary_bytes

_READ_BYTES = 64 * 1024
_MOST_DESCRIPTORS = 4
# As enumerations these take a microsecond each time.
_CLOSE_ON_EXEC, _AT_ONCE = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_DONTWAIT)
_RECEIVED = _READ_BYTES, compute_ancillary_bytes(_MOST_DESCRIPTORS), _CLOSE_ON_EXEC
#: Arguments of `recvmsg` for a reception without a wait.
RECEIVED_AT_ONCE = _READ_BYTES, compute_ancillary_bytes(_MOST_DESCRIPTORS), _CLOSE_ON_EXEC | _AT_ONCE

# A response within the first time, waking included, might have been polled for; the second is how long to poll.  On
# virtual machines waking alone can take 0.2 ms.
_SOON_S, _POLLED_S = 400e-6, 300e-6
# On one core the server would wait meanwhile.
_MAY_POLL = len(os.sched_getaffinity(0)) > 1
#: The shortest timeout; shorter ones might be rounded to 0, which is no timeout.
SHORTEST_WAIT_S = 1e-4


class PollingReceiver:
    """A receiver on a blocking socket, which polls before it sleeps.

    Attributes:
        is_prompt: the last response arrived quickly, so the next one is polled for.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._connected = connected
        self.is_prompt = False
        # For how long the one that is waited for was polled for, in vain.
        self._polled_s = 0.0

    def receive(self) -> Any:
        """Receive, and return the result of `recvmsg`.

        Raises:
            BlockingIOError: nothing arrived in time; the next call sleeps until something does.
        """
        return self._poll() if self.is_prompt else self._wait()

    def _poll(self) -> Any:
        """Receive by polling for a short time.

        A thread that sleeps takes longer to wake than a server with a GPU takes for a small request.  Other threads
        that want to run on this core do so meanwhile.

        Raises: BlockingIOError: nothing arrived.
        """
        receive = self._connected.recvmsg
        try:
            return receive(*RECEIVED_AT_ONCE)
        except BlockingIOError:
            give_up = time.perf_counter() + _POLLED_S
        while True:
            os.sched_yield()
            try:
                return receive(*RECEIVED_AT_ONCE)
            except BlockingIOError:
                if time.perf_counter() > give_up:
                    self.is_prompt, self._polled_s = False, _POLLED_S
                    raise

    def _wait(self) -> Any:
        """Receive by sleeping in the kernel until something arrives or the socket's timeout passes."""
        began = time.perf_counter() - self._polled_s
        received = self._connected.recvmsg(*_RECEIVED)
        self.is_prompt, self._polled_s = _MAY_POLL and time.perf_counter() - began <= _SOON_S, 0.0
        return received
