"""A fleet in one process, as far as layers go."""

import asyncio
import functools
from types import SimpleNamespace

from normserve.codec import safetensors
from normserve.jobs.job import NormSpec, Op, PassDirection, RegisteredLayer
from normserve.layers.layer_changes import FleetLayerChanges
from normserve.layers.registry import LayerRegistry
from normserve.memory.tensors import DType, HostTensor
from normserve.peers.sibling_processes import FleetPosition, SiblingProcesses

BODY = memoryview(
    bytearray(b"".join(safetensors.encode({"weight": HostTensor(DType.FLOAT32, (1,), memoryview(bytearray(4)))})))
)


def layer(name: str, query: bytes = b"") -> RegisteredLayer:
    return RegisteredLayer(
        name, NormSpec(Op.RMS_NORM, PassDirection.FORWARD, 1.0), 1, DType.FLOAT32, False, 4, query
    )


class Process:
    """One process of a fleet, as far as layers go.

    Attributes:
        at_making: called before a layer is made.
        diverged: whether it has asked to be started again.
    """

    def __init__(self, index: int, count: int, folder, max_layers: int = 10) -> None:
        self.registry = LayerRegistry(max_layers=max_layers, max_bytes=2**20)
        siblings = self.siblings = SiblingProcesses(FleetPosition(index, count, "cpu", 0, folder))
        self.changes = FleetLayerChanges(self.registry, siblings, self._make, folder)
        self.changes.on_divergence = lambda: setattr(self, "diverged", True)
        self.diverged = False
        self.at_making = None
        self.journal = self.changes._journal
        self.server = None

    async def start(self, *of_checkpoint: str) -> "Process":
        self.server = await self.siblings.start_listening()
        for name in of_checkpoint:
            self.registry.put_or_replace(layer(name, b"checkpoint"))
        await self.changes.synchronise()
        return self

    @property
    def layers(self) -> dict[str, bytes]:
        return {each.name: each.backend_parameters for each in self.registry.list_layers()}

    async def put(self, name: str, query: bytes = b"first") -> bool:
        return (await self.changes.register_or_replace(name, query, BODY))[1]

    async def _make(self, name: str, query: bytes, body: memoryview) -> RegisteredLayer:
        if self.at_making is not None:
            await self.at_making()
        assert "weight" in safetensors.decode(body)
        return layer(name, query)


def fleet_of(count: int, *of_checkpoint: str):
    """A test that is a coroutine and is given the processes of a fleet."""

    def decorate(play):
        @functools.wraps(play)
        def test(tmp_path):
            async def run() -> None:
                processes = [Process(index, count, tmp_path) for index in range(count)]
                for each in processes:
                    await each.start(*of_checkpoint)
                try:
                    await play(
                        SimpleNamespace(processes=processes, folder=tmp_path, a=processes[0], b=processes[1])
                    )
                finally:
                    for each in processes:
                        each.server.close()
                    await asyncio.sleep(0)

            asyncio.run(asyncio.wait_for(run(), 30))

        del test.__wrapped__
        return test

    return decorate


async def agreed(fleet) -> dict[str, bytes]:
    """What all have in the end."""
    async with asyncio.timeout(10):
        while len({tuple(each.layers.items()) for each in fleet.processes}) > 1:
            await asyncio.sleep(0.001)
    assert not any(each.diverged for each in fleet.processes)
    return fleet.a.layers


def files(fleet) -> list[str]:
    return sorted(path.name for path in fleet.folder.rglob("*") if path.suffix == ".layer" or path.name == "staged")


def failing(error: Exception):
    async def fail() -> None:
        raise error

    return fail
