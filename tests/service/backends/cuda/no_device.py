"""What stands in for a device: streams on which everything has happened, and the CPU's kernels."""

import contextlib
import time

from fusednorm.cpu import batch_invariant


class Instant:
    """An event and a stream on which everything has happened as soon as it is put there."""

    cuda_stream = cuda_event = 5

    def record(self, stream):
        self.at = time.perf_counter()

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)

    def wait_event(self, event):
        pass


class HostStreams:
    def __init__(self, *, urgent):
        pass

    def make_stream(self):
        return Instant()

    def make_event(self):
        return Instant()

    def make_graph_event(self):
        return Instant()

    def use(self, stream):
        return contextlib.nullcontext()


class Writing:
    """The CPU's functions, which write their results where the caller wants them.

    Attributes:
        written: the pieces of memory that the results of each call went to.
    """

    def __init__(self) -> None:
        self.written: list[set[int]] = []

    def __getattr__(self, name):
        function = getattr(batch_invariant, name)

        def write(*leading, out=None, **options):
            result = function(*leading, **options)
            if out is None:
                return result
            given = [there for there in out if there is not None]
            self.written.append({there.untyped_storage().data_ptr() for there in given})
            for here, there in zip(result, out, strict=True):
                if there is not None:
                    there.copy_(here)
            return out

        return write
