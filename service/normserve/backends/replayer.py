"""What answers requests that recur, by launching again what was captured of their first launches."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class CapturedLaunch(NamedTuple):
    """The captured launch of jobs that recur: launched again, it computes the next of them.

    Attributes:
        graph, stream: the driver's handles.
        stage_events: of each of its parts, the events at the end of its copy-in and of its computation; none where
            nothing is copied.
        retained: keeps the graph, and the memory that it reads and writes.
    """

    graph: int
    stream: int
    stage_events: Sequence[tuple[int, int]]
    retained: object


#: Kinds of what a `LaunchReplayer` hands to its caller: bytes that have come, the rest of an answer, a launch that
#: has failed, and a request whose client had gone before its answer was sent.
RECEIVED, UNSENT, FAILED, LEFT = range(4)

Event = tuple[int, int, int, int, Any]
"""Kind, descriptor, tag, the driver's code; and bytes of the first two kinds, else what `learn` was given."""

Sample = tuple[float, float, float, float, float, float, float]
"""When a request had come and was launched; seconds of its stages; when its answer was begun and had been sent.

Moments are by `time.perf_counter`, and the stages are copy-in, kernel and copy-out.
"""


class LaunchReplayer(Protocol):
    """Answers requests that recur on connections, by launching graphs, while Python's lock is free.

    Connections go by their descriptors.  All methods are called on one thread.
    """

    def fileno(self) -> int:
        """Readable when something has come on a connection that is read."""

    def add_connection(self, descriptor: int) -> None:
        """Take over a connection; nothing is read from it yet."""

    def remove_connection(self, descriptor: int) -> None:
        """Forget a connection, before it is closed; what is in flight is not answered."""

    def set_receiving(self, descriptor: int, wanted: bool) -> None:
        """Whether anything is to be received from a connection."""

    def set_caller_state(self, descriptor: int, is_within_frame: bool, is_behind: bool) -> None:
        """Say what the caller has of a connection: the beginning of a frame, and answers that are not sent."""

    def add_replay(
        self,
        descriptor: int,
        content: bytes,
        graph: int,
        stream: int,
        marks: Sequence[tuple[int, int]],
        results: bytes,
        kernel_bytes: int,
        admitted_bytes: int,
        held: object,
    ) -> None:
        """Answer a frame of this content from now on.

        Args:
            graph, stream, marks: as of `CapturedLaunch`.
            kernel_bytes: the fewest bytes that the launch must move.
            results: of the answer, in JSON.
            admitted_bytes: that such a request takes of the server's budget.
            held: kept as long as it is known or in flight, and handed out with events and samples.
        """

    def remove_replays(self, descriptor: int) -> None:
        """Answer none of a connection's frames any more."""

    def remove_all_replays(self) -> None:
        """Answer no frames any more."""

    def serve(
        self, requests: int, nbytes: int, may_launch: bool, poll_s: float, others: int, most_s: float
    ) -> list[Event]:
        """Receive, launch and answer, until there is something for the caller or nothing to do.

        Args:
            requests, nbytes: as many may be admitted.
            may_launch: else everything is for the caller.
            poll_s: for so long to poll for a request that follows an answer closely.
            others: a descriptor that ends the call when it is readable and no connection is; -1 without one.
            most_s: the call takes hardly longer.
        """

    def take_samples(self) -> list[tuple[Any, list[Sample]]]:
        """What was measured of each request since the last call, under what `add_replay` was given."""

    def count_launches(self, descriptor: int) -> int:
        """Launches of a connection that have not ended."""

    def count_all(self) -> tuple[int, int, int]:
        """Launches that have not ended, the bytes that they were admitted with, and samples."""
