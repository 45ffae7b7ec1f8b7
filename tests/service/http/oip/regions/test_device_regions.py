"""Regions of CUDA memory, with a driver that keeps it in the host's."""

import asyncio
import gc
from types import SimpleNamespace

import pytest
from normserve.admission.client_identity import ClientIdentity
from normserve.errors import ForbiddenError, NotReadyError, UnusableRegionError
from normserve.http.oip.inference_request import (
    BinarySource,
    InferenceRequest,
    InputTensor,
    RegionReference,
    RequestedOutput,
)
from normserve.http.oip.region_tensors import RegionTensorAccess, RegionTransfer, check_and_assign_result_buffers
from normserve.http.oip.regions.device_regions import DeviceRegion, DeviceRegionOpener, is_local_address
from normserve.http.oip.regions.region_registry import RegionRegistry
from normserve.jobs.job import NormJob, NormSpec, Op, PassDirection
from normserve.memory.device_segments import ShareableDevice
from normserve.memory.slabs import SlabPool
from normserve.memory.tensors import DeviceTensor, DType

from tests.service.memory.allocations import allocation_of
from tests.service.memory.fake_driver import FakeDriver

NBYTES = 2**21
HERE, REMOTE = ClientIdentity("127.0.0.1"), ClientIdentity("192.0.2.1")
SPEC = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)


class Sides:
    """A client with an allocation, and a server that may open it."""

    def __init__(self) -> None:
        self.client, self.server = ShareableDevice(0, FakeDriver()), ShareableDevice(0, FakeDriver())
        self.address = self.client.driver.allocate(NBYTES)
        self.engine = SimpleNamespace(
            device_description=object(), shareable_device=self.server, require_ready=lambda: None
        )
        self.memory = DeviceRegionOpener(True, self.engine)
        self.regions = RegionRegistry(None, 2**40, shares_device_memory=True)
        self.tensors = RegionTensorAccess(self.regions, RegionTransfer(SlabPool(max_idle_bytes=0)), self.memory)

    def register(self, name="r", caller=HERE, nbytes=NBYTES) -> None:
        handle = allocation_of(self.client, self.address).handle
        region = asyncio.run(self.memory.open_region(caller, handle, 3, nbytes))
        self.regions.register_region(caller.key, name, region)

    @property
    def opened(self) -> int:
        gc.collect()
        return sum(self.server.driver.opens.values())


@pytest.fixture
def sides():
    sides = Sides()
    yield sides
    sides.client.driver.free(sides.address)


X, Y = RegionReference("r", 0, 96), RegionReference("r", 4096, 96)


def asked(x=X, y=Y) -> InferenceRequest:
    given = InputTensor("x", DType.FLOAT32, (2, 12), 96, x)
    return InferenceRequest(
        SPEC, None, (given,), (RequestedOutput("y", False, y),), False, None, None, uses_regions=True
    )


@pytest.mark.parametrize("address", ["unix", "127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_this_host(address):
    assert is_local_address(address)


@pytest.mark.parametrize(
    "address", ["192.0.2.1", "0.0.0.0", "::", "::2", "::ffff:192.0.2.1", "10.0.0.1", "", "uid 0", "localhost"]
)
def test_other_hosts(address):
    assert not is_local_address(address)


def test_memory_is_opened_for_clients_of_this_host_and_used_by_no_other(sides):
    with pytest.raises(ForbiddenError, match="loopback or a Unix socket"):
        sides.register(caller=REMOTE)
    assert not sides.opened
    sides.register()
    assert sides.tensors.bind_regions(HERE, asked()).is_on_device
    with pytest.raises(ForbiddenError, match="loopback or a Unix socket"):
        sides.tensors.bind_regions(REMOTE, asked())


def test_what_a_request_found_stays_mapped(sides):
    sides.register()
    found = sides.tensors.bind_regions(HERE, asked())
    places = asyncio.run(sides.tensors.read_inputs(found))
    sides.regions.unregister_regions(None, "cuda")
    assert (sides.opened, sides.regions.open_count, sides.regions.open_bytes) == (1, 1, NBYTES)
    with pytest.raises(UnusableRegionError, match="no region"):
        sides.tensors.bind_regions(HERE, asked())
    del found
    assert sides.opened == 1
    del places
    assert (sides.opened, sides.regions.open_count, sides.regions.open_bytes) == (0, 0, 0)


def test_nothing_stays_mapped_in_the_end(sides):
    for name in ("a", "b"):
        sides.register(name)
    assert sides.opened == 2
    sides.regions.unregister_all()
    assert sides.opened == 0


def test_a_region_that_is_refused_is_closed(sides):
    sides.register()
    with pytest.raises(UnusableRegionError, match="unregister it first"):
        sides.register()
    assert sides.opened == 1


def test_memory_of_another_device_is_refused(sides):
    sides.server.ordinal = 1
    with pytest.raises(UnusableRegionError, match="it is on another"):
        sides.register()
    assert not sides.opened


def test_a_false_extent_is_refused(sides):
    with pytest.raises(UnusableRegionError, match="must have the"):
        sides.register(nbytes=NBYTES + 1)
    assert not sides.opened


def test_before_the_server_is_ready(sides):
    def refuse() -> None:
        raise NotReadyError("warming up")

    sides.engine.require_ready = refuse
    sides.engine.device_description = None
    with pytest.raises(NotReadyError):
        sides.register()
    assert not sides.memory.is_enabled


def test_switched_off():
    memory = DeviceRegionOpener(False, SimpleNamespace(device_description=object(), shareable_device=object()))
    assert not memory.is_enabled
    with pytest.raises(UnusableRegionError, match="--oip-cuda-shared-memory"):
        memory.require_local_client(HERE)


def test_a_tensor_cannot_begin_anywhere(sides):
    sides.register()
    with pytest.raises(UnusableRegionError, match="multiple of 16"):
        sides.tensors.bind_regions(HERE, asked(y=RegionReference("r", 4104, 96)))


def test_a_tensor_in_the_body_is_none_on_the_device(sides):
    sides.register()
    with pytest.raises(UnusableRegionError, match="all be in regions"):
        sides.tensors.bind_regions(HERE, asked(x=BinarySource(0)))
    with pytest.raises(UnusableRegionError, match="all be in regions"):
        sides.tensors.bind_regions(HERE, asked(y=None))


@pytest.mark.parametrize(("offset", "is_over"), [(4096, False), (96, False), (0, True)])
def test_a_job_on_the_device_has_places(sides, offset, is_over):
    sides.register()
    found = sides.tensors.bind_regions(HERE, asked(y=RegionReference("r", offset, 96)))
    x = asyncio.run(sides.tensors.read_inputs(found))["x"]
    job = check_and_assign_result_buffers(
        found, NormJob(SPEC, {"x": DeviceTensor(DType.FLOAT32, (2, 12), x)}, may_overwrite=True)
    )
    assert job.is_on_device
    assert job.may_overwrite == is_over
    region = sides.regions.find_range(None, "r", 0, 1).region
    assert isinstance(region, DeviceRegion)
    place = job.result_buffers["y"].__cuda_array_interface__
    assert place["data"] == (region.address + offset, False)
    assert place["shape"] == (96,)
