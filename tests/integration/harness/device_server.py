"""`normserve` with a device whose memory is the host's: what clients have of it is shared as a GPU's is."""

import sys
from math import prod

import normserve.http.service
import torch
from normserve.backends import cpu
from normserve.backends.cpu.backend import TorchBackend
from normserve.backends.cuda import device_work
from normserve.backends.cuda.replays import Replays
from normserve.backends.tensors import TORCH_DTYPES
from normserve.cli.commands import main
from normserve.jobs.job import Execution
from normserve.memory.device_segments import Device

from tests.service.memory.fake_driver import FakeDriver, bytes_at


def seen(data, dtype, shape):
    if not prod(shape):
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    there = bytes_at(data.__cuda_array_interface__["data"][0], len(data))
    there.kept = data
    return torch.frombuffer(there, dtype=TORCH_DTYPES[dtype]).view(shape)


class NoGraphs:
    def capture(self, call):
        raise RuntimeError("there are no graphs here")


class DeviceBackend(TorchBackend):
    def start(self):
        self.device_memory = Device(0, FakeDriver())
        self._replays = Replays(NoGraphs())
        return super().start()

    @torch.inference_mode()
    def run(self, batch):
        if not batch.jobs[0].is_on_device:
            return super().run(batch)
        work = device_work.device_work(batch.jobs[0], cpu, self._replays)
        work.compute()
        return Execution((work.results,), (work.kernel_bytes,), 0.0, 1e-6, 0.0, are_placed=True)


if __name__ == "__main__":
    device_work._seen = seen
    device_work.results_to_write = lambda job, rows: None
    normserve.http.service.choose_backend = lambda name, threads, slabs, sizes: DeviceBackend(threads, slabs)
    sys.exit(main())
