"""The interface of a replayer: it answers recurring requests by replaying captured launches."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class CapturedLaunch(NamedTuple):
    """A CUDA graph of a recurring job's launch.  Each replay computes results from the inputs that are then in the
    job's memory.

    Attributes:
        graph, stream: the driver's handles.
        part_events: for each part, the events at the end of its copy-in and of its computation; empty
            if nothing is copied.
        retained: keeps the graph alive, and the memory that it reads and writes.
    """

    graph: int
    stream: int
    part_events: Sequence[tuple[int, int]]
    retained: object


#: Kinds of events that a `LaunchReplayer` returns to its caller: received bytes, the unsent part of a response, a
#: failed launch, and a request whose client had disconnected before its response was sent.
RECEIVED, UNSENT, FAILED, LEFT = range(4)

Event = tuple[int, int, int, int, Any]
"""Kind, descriptor, tag, the driver's error code, and data: bytes for the first two kinds, else the `retained` of
`add_replay`.
"""

Sample = tuple[float, float, float, float, float, float, float]
"""Times of arrival and launch; seconds of each stage; times at which the response was begun and had been sent.

Times are by `time.perf_counter`, and the stages are copy-in, kernel and copy-out.
"""


class LaunchReplayer(Protocol):
    """The interface of the C code that answers repeated requests.  It replays CUDA graphs and does not hold
    Python's lock.

    Connections are identified by their file descriptors.  All methods are called on one thread.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable when a connection that is read has data."""

    def add_connection(self, descriptor: int) -> None:
        """Take over a connection; nothing is read from it yet."""

    def remove_connection(self, descriptor: int) -> None:
        """Forget a connection before it is closed; launches in flight are not answered."""

    def set_receiving(self, descriptor: int, wanted: bool) -> None:
        """Set whether data is received from a connection."""

    def set_caller_state(self, descriptor: int, is_within_frame: bool, has_unsent_responses: bool) -> None:
        """Set whether the caller has part of a frame from a connection, and whether it has unsent responses for
        it.
        """

    def add_replay(
        self,
        descriptor: int,
        content: bytes,
        graph: int,
        stream: int,
        part_events: Sequence[tuple[int, int]],
        results: bytes,
        kernel_bytes: int,
        admitted_bytes: int,
        retained: object,
    ) -> None:
        """Register a graph for a connection.  From now on, each request with exactly the bytes `content` is
        answered by a replay of the graph.

        Args:
            graph, stream, part_events: as of `CapturedLaunch`.
            kernel_bytes: the fewest bytes that the launch must move.
            results: the results' description in the response, in JSON.
            admitted_bytes: the share of the server's memory budget that such a request takes.
            retained: kept while the replay is registered or in flight, and returned with events and
                samples.
        """

    def remove_replays(self, descriptor: int) -> None:
        """Stop answering a connection's frames."""

    def remove_all_replays(self) -> None:
        """Stop answering frames."""

    def serve(
        self, requests: int, nbytes: int, may_launch: bool, poll_s: float, other_descriptor: int, max_s: float
    ) -> list[Event]:
        """Receive requests, replay their graphs and send responses.  Return the events for the caller once there
        are any, or once nothing is left to do.

        Args:
            requests, nbytes: how many requests, and of how many bytes, may be admitted.
            may_launch: else every request is returned to the caller.
            poll_s: how long to poll for a request that closely follows a response.
            other_descriptor: ends the call when it is readable and no connection is; -1 without one.
            max_s: the call takes hardly longer.
        """

    def take_samples(self) -> list[tuple[Any, list[Sample]]]:
        """Return the measurements of each request since the last call, with the `retained` of `add_replay`."""

    def count_launches(self, descriptor: int) -> int:
        """Count a connection's launches in flight."""

    def count_all(self) -> tuple[int, int, int]:
        """Return the number of launches in flight, the bytes that they were admitted with, and the number of
        samples.
        """
