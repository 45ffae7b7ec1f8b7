"""The interface between the executor and a device."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from normserve.backends.replay_interface import CapturedLaunch, LaunchReplayer
from normserve.errors import NormserveError
from normserve.jobs.device_description import DeviceDescription
from normserve.jobs.job import Batch, BatchResult, NormJob, Op, QueueLane, ReplaySlot
from normserve.memory.device_segments import ShareableDevice
from normserve.memory.tensors import HostTensor


@dataclass(frozen=True, slots=True)
class LaunchDepth:
    """The limits on the number of batches in progress on a device.  They may be in copy-in, computation or copy-out
    at the same time.

    Attributes:
        max_launches: of both lanes together.
        max_launches_by_lane: of each lane.
    """

    max_launches: int
    max_launches_by_lane: Mapping[QueueLane, int]


ONE_AT_A_TIME = LaunchDepth(1, dict.fromkeys(QueueLane, 1))


class PendingLaunch(ABC):
    """A batch that has been launched on the device, and may not have ended yet."""

    @abstractmethod
    def poll(self, seconds: float) -> bool:
        """Poll for the end of the batch for at most `seconds`; return whether `wait` would not block.  Raises the
        device's errors.
        """

    @abstractmethod
    def wait(self) -> BatchResult:
        """Block until the batch is done; called once, on any thread, and raises the device's errors."""


class Backend(Protocol):
    """The interface of a device: it runs batches and keeps the parameters of layers.

    Methods are called on the one thread that owns the device, unless they say otherwise.

    Attributes:
        launch_depth: the number of batches that it may have at once.
        max_inline_bytes: an idle device runs batches of up to so many bytes on the caller's thread, in
            less time than a handover to its own thread takes.
    """

    name: str
    launch_depth: LaunchDepth
    max_inline_bytes: int

    @property
    def compiled_classes(self) -> Collection[Hashable] | None:
        """The classes of jobs (`NormJob.compute_kernel_class`) whose kernels `start` compiled; None if the backend
        compiles none.
        """

    def start(self) -> DeviceDescription:
        """Initialise the device, compile or load the kernels of common requests, and measure the copy bandwidth.

        Raises:
            NormserveError: the device cannot be used.
        """

    def load_parameters(self, op: Op, weight: HostTensor, bias: HostTensor | None) -> object:
        """Store a layer's parameters where kernels read them, for as long as the returned object lives.

        May compile the kernels for inputs of the parameters' dtype; called from the thread that compiles.
        """

    def run(self, batch: Batch) -> BatchResult | PendingLaunch:
        """Run jobs of one class as one launch; return the result, or a pending launch if the device has not
        finished.
        """

    def can_launch_without_waiting(self, batch: Batch) -> bool:
        """Return whether `run` would launch a batch without waiting for memory, a compiler or a copy on the host.
        If so, `run` may be called on another thread while the owner has nothing to do.
        """

    def compile_and_load_kernels(self, job: NormJob) -> None:
        """Compile the kernels of the job's class; called from a separate thread, in parallel with `run`."""

    def register_host_memory(self, memory: memoryview) -> object:
        """Prepare memory that is shared with clients on this host for fast copies, until the returned object
        is deleted.

        Called from any thread; if the memory cannot be prepared, copies take longer.
        """

    def is_better_unbatched(self, job: NormJob) -> bool:
        """Return whether recurring jobs like this one should run alone, in their client's memory, and not in
        batches.

        Called from any thread, after `start`.
        """

    def get_captured_launch(self, replay_slot: ReplaySlot) -> CapturedLaunch | None:
        """Return the captured launch of recurring jobs, or None if there is none."""

    def make_replayer(self) -> LaunchReplayer | None:
        """Make an object that replays captured launches; None if the backend has none.  Called on the thread that
        will call its methods.
        """

    @property
    def shareable_device(self) -> ShareableDevice | None:
        """The device whose memory can be shared with clients on this host; None if there is none.  Read after
        `start`.

        Jobs on the device (`NormJob.is_on_device`) are submitted only if there is one.
        """

    def translate_error(self, error: Exception) -> NormserveError | None:
        """Translate an exception from `run` or `load_parameters`; None if the device did not cause it."""

    def read_memory_bytes(self) -> Mapping[str, int]:
        """Return bytes of device memory by kind (`allocated`, `reserved`, …); called from any thread."""
