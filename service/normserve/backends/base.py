"""The interface between the executor and a device."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from normserve.backends.replayer import CapturedLaunch, LaunchReplayer
from normserve.errors import NormserveError
from normserve.jobs.device import DeviceDescription
from normserve.jobs.job import Batch, BatchResult, NormJob, Op, QueueLane, ReplaySlot
from normserve.memory.device_segments import ShareableDevice
from normserve.memory.host_tensors import HostTensor


@dataclass(frozen=True, slots=True)
class LaunchDepth:
    """How many batches a device may have at once: copied in, computed and copied out side by side.

    Attributes:
        max_launches: of both lanes.
        max_launches_by_lane: of each.
    """

    max_launches: int
    max_launches_by_lane: Mapping[QueueLane, int]


ONE_AT_A_TIME = LaunchDepth(1, dict.fromkeys(QueueLane, 1))


class PendingLaunch(ABC):
    """A batch that is on the device."""

    @abstractmethod
    def poll(self, seconds: float) -> bool:
        """Watch for its end for so long at most; whether `wait` would not block.  Raises the device's errors."""

    @abstractmethod
    def wait(self) -> BatchResult:
        """Block until it is done; called once, on any thread, with the errors of the device."""


class Backend(Protocol):
    """One device.  Methods are called on the one thread that owns it, unless they say otherwise.

    Attributes:
        launch_depth: how many batches it may have at once.
        max_inline_bytes: an idle device runs batches of up to so many bytes on whatever thread they come from,
            sooner than they could be handed to its own.
    """

    name: str
    launch_depth: LaunchDepth
    max_inline_bytes: int

    @property
    def compiled_classes(self) -> Collection[Hashable] | None:
        """The classes of jobs (`NormJob.compute_kernel_class`) whose kernels `start` compiled; None: never any."""

    def start(self) -> DeviceDescription:
        """Claim the device, compile or load what requests will need, and measure the copy roof.

        Raises:
            NormserveError: the device cannot be used.
        """

    def load_parameters(self, op: Op, weight: HostTensor, bias: HostTensor | None) -> object:
        """Keep a layer's parameters where kernels read them, for as long as the returned object lives.

        What inputs of the parameters' dtype will need may be compiled; called from the thread that compiles.
        """

    def run(self, batch: Batch) -> BatchResult | PendingLaunch:
        """Run jobs of one class as one launch, or set it going."""

    def can_launch_without_waiting(self, batch: Batch) -> bool:
        """Whether `run` would set a batch going without waiting for memory, a compiler or a copy on the host: then
        it may be called on another thread, while the owner has nothing to do.
        """

    def compile_kernels(self, job: NormJob) -> None:
        """Compile what jobs of this one's class will run; called from a thread of its own, beside `run`."""

    def register_host_memory(self, memory: memoryview) -> object:
        """Prepare memory that clients on this host share for copies, for as long as the returned object lives.

        Called from any thread; where it cannot be prepared, copies take longer.
        """

    def is_better_unbatched(self, job: NormJob) -> bool:
        """Whether jobs that recur like this one are best computed each by itself, where their client has them.

        Called from any thread, once it has started.
        """

    def get_captured_launch(self, recurrence: ReplaySlot) -> CapturedLaunch | None:
        """The captured launch of such jobs, if there is one."""

    def make_replayer(self) -> LaunchReplayer | None:
        """What launches captured launches again; None without one.  Called on the thread that it will serve on."""

    @property
    def shareable_device(self) -> ShareableDevice | None:
        """Whose memory clients on this host may have; None where none can be shared.  Asked once it has started.

        Jobs that are on the device (`NormJob.is_on_device`) come only where there is one.
        """

    def translate_error(self, error: Exception) -> NormserveError | None:
        """Say what an exception out of `run` or `load_parameters` means; None when it is not the device's doing."""

    def read_memory_bytes(self) -> Mapping[str, int]:
        """Bytes of device memory by kind (`allocated`, `reserved`, …); called from any thread."""
