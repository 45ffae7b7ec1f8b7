"""Allocations of one process that another uses, with a driver that keeps them in the host's memory."""

import gc

import pytest
from normserve.memory.device_segments import DeviceMemoryError, ShareableDevice
from normserve.memory.ipc_allocations import HANDLE_BYTES, IpcAllocation, open_allocation

from tests.service.memory.allocations import allocation_of
from tests.service.memory.fake_driver import FakeDriver, bytes_at

NBYTES = 2**21


class Sides:
    """A client with an allocation, and a server."""

    def __init__(self) -> None:
        self.client, self.server = ShareableDevice(0, FakeDriver()), ShareableDevice(0, FakeDriver())
        self.address = self.client.driver.allocate(NBYTES)

    def open(self, nbytes: int = NBYTES, handle: bytes | None = None) -> IpcAllocation:
        handle = allocation_of(self.client, self.address).handle if handle is None else handle
        return open_allocation(self.server, handle, nbytes, IpcAllocation)

    @property
    def opened(self) -> dict:
        gc.collect()
        return self.server.driver.opens


@pytest.fixture
def sides():
    return Sides()


def test_what_one_writes_the_other_reads(sides):
    found = allocation_of(sides.client, sides.address + 4096)
    assert (found.address, found.nbytes, len(found.handle)) == (sides.address, NBYTES, HANDLE_BYTES)
    opened = sides.open()
    bytes_at(sides.address, 3)[:] = b"abc"
    assert bytes_at(opened.address, 3).raw == b"abc"
    assert len(opened) == NBYTES


def test_it_is_closed_with_its_last_view(sides):
    opened = sides.open()
    view = opened.view()[16:32]
    del opened
    assert sides.opened
    del view
    assert not sides.opened


def test_two_that_have_the_same_open_close_it_once_each(sides):
    first, second = sides.open(), sides.open()
    assert first.address == second.address
    del first
    assert sides.opened == {second.address: 1}
    del second
    assert not sides.opened


@pytest.mark.parametrize("nbytes", [0, NBYTES + 1, 2**63 - 1, 2**64])
def test_a_false_extent_is_refused_and_nothing_stays_open(sides, nbytes):
    with pytest.raises(ValueError, match="must have"):
        sides.open(nbytes)
    assert not sides.opened


def test_the_extent_counts_from_where_the_handle_points(sides):
    driver = sides.server.driver
    whole = driver.cuMemGetAddressRange
    driver.cuMemGetAddressRange = lambda address: (0, whole(address)[1] - 4096, NBYTES)
    with pytest.raises(ValueError, match="must have"):
        sides.open(NBYTES - 4095)
    assert len(sides.open(NBYTES - 4096)) == NBYTES - 4096


def test_memory_of_another_device_is_refused(sides):
    sides.server.ordinal = 1
    with pytest.raises(ValueError, match="device"):
        sides.open()
    assert not sides.opened


def test_what_is_no_handle(sides):
    with pytest.raises(DeviceMemoryError):
        sides.open(handle=bytes(HANDLE_BYTES))
    assert not sides.opened
