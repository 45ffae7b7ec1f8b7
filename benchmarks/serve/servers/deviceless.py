"""normserve with a device that returns at once, to measure a request's cost without the device.

usage: python -m benchmarks.serve.servers.deviceless
Reads its settings from the environment, like `normserve serve`.
"""

import sys
from collections.abc import Mapping

from normserve.backends.interface import ONE_AT_A_TIME
from normserve.errors import NormserveError
from normserve.http.app import create_app
from normserve.jobs.device_description import DeviceDescription
from normserve.jobs.job import Batch, BatchResult, NormJob, Op, ReplaySlot
from normserve.logs.formatting import configure_logging
from normserve.memory.tensors import HostTensor
from normserve.process.owner_server import run_server
from normserve.settings import Settings


class NullBackend:
    """Returns x as y, on the calling thread."""

    name = "none"
    launch_depth = ONE_AT_A_TIME
    max_inline_bytes = 2**62
    compiled_classes = None
    shareable_device = None

    def start(self) -> DeviceDescription:
        return DeviceDescription(name="none", kind="none", copy_bandwidth=0.0, versions={})

    def load_parameters(self, op: Op, weight: HostTensor, bias: HostTensor | None) -> object:
        return None

    def run(self, batch: Batch) -> BatchResult:
        outputs = tuple({"y": job.x} for job in batch.jobs)
        return BatchResult(outputs, tuple(2 * job.nbytes for job in batch.jobs), 0.0, 0.0, 0.0)

    def can_launch_without_waiting(self, batch: Batch) -> bool:
        return False

    def compile_and_load_kernels(self, job: NormJob) -> None:
        """Do nothing: there is nothing to compile."""

    def register_host_memory(self, memory: memoryview) -> object:
        return None

    def is_better_unbatched(self, job: NormJob) -> bool:
        return False

    def get_captured_launch(self, replay_slot: ReplaySlot) -> None:
        return None

    def make_replayer(self) -> None:
        return None

    def translate_error(self, error: Exception) -> NormserveError | None:
        return None

    def read_memory_bytes(self) -> Mapping[str, int]:
        return {}


def main() -> int:
    settings = Settings(**{})
    configure_logging(settings.log_level)
    return run_server(settings, create_app(settings, NullBackend))


if __name__ == "__main__":
    sys.exit(main())
