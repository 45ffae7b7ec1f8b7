"""`normserve` with a device whose memory is the host's: what clients have of it is shared as a GPU's is."""

import sys
import weakref
from math import prod

import normserve.http.application_services
import torch
from normserve.backends.cpu.backend import CpuBackend
from normserve.backends.cuda import client_memory_launches, graph_cache
from normserve.backends.cuda.batch_buffers import BatchBufferAllocator
from normserve.backends.cuda.pipeline import StreamPipeline
from normserve.backends.cuda.replayer import build
from normserve.backends.replay_interface import CapturedLaunch
from normserve.backends.tensor_conversion import TORCH_DTYPES
from normserve.cli.commands import main
from normserve.memory.device_segments import ShareableDevice

from tests.service.backends.cuda.fake_driver import FakeDriver as LaunchingDriver
from tests.service.backends.cuda.no_device import HostStreams, Writing
from tests.service.memory.fake_driver import FakeDriver, bytes_at


def seen(data, dtype, shape):
    if not prod(shape):
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    there = bytes_at(data.__cuda_array_interface__["data"][0], len(data))
    there.kept = data
    return torch.frombuffer(there, dtype=TORCH_DTYPES[dtype]).view(shape)


class Graph:
    """A call, which the driver launches by its number."""

    def __init__(self, call, driver):
        self._call = call
        self._driver = driver
        self._driver.graphs[id(self)] = self

    def replay(self):
        with torch.inference_mode():
            self._call()


class Driver(LaunchingDriver):
    """Has the kernels of a captured launch run when it is launched."""

    def __init__(self):
        super().__init__()
        self.graphs = weakref.WeakValueDictionary()
        self.on_launch = lambda number: self.graphs[number].replay()

    def capture(self, call):
        return Graph(call, self)


class DeviceBackend(CpuBackend):
    def start(self):
        self.shareable_device = ShareableDevice(0, FakeDriver())
        self._driver = Driver()
        self._replays = graph_cache.GraphCache(self._driver)
        self._places = BatchBufferAllocator(self._slabs)
        self._pipeline = StreamPipeline(HostStreams(urgent=True))
        return super().start()

    @torch.inference_mode()
    def run(self, batch):
        job = batch.jobs[0]
        if not job.is_on_device:
            return super().run(batch)
        prepared = None if job.replay_slot is None else job.replay_slot.prepared
        if prepared is None:
            prepared = client_memory_launches.try_prepare_client_memory_launch(
                self._places.describe_job_buffers(job), Writing(), self._pipeline, self._replays, iter(())
            )
            if job.replay_slot is not None:
                job.replay_slot.prepared = prepared
        return prepared.start_and_capture_when_due()

    def get_captured_launch(self, replay_slot):
        prepared = replay_slot.prepared
        if not isinstance(prepared, client_memory_launches.ClientMemoryLaunch) or prepared.captured_graph is None:
            return None
        return CapturedLaunch(id(prepared.captured_graph), 1, (), (prepared, prepared.captured_graph))

    def make_replayer(self):
        return build.load_extension()(**self._driver.addresses())


if __name__ == "__main__":
    # What comes again is soon answered without Python code.
    graph_cache._CALLS_BEFORE_CAPTURE = 2
    client_memory_launches._view_as_device_tensor = seen
    normserve.http.application_services.make_backend_by_name = lambda name, threads, slabs, sizes: DeviceBackend(
        threads, slabs
    )
    sys.exit(main())
