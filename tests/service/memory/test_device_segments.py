"""Memory of a device between two processes, with a driver that keeps it in the host's memory."""

import gc
import os

import pytest
from normserve.memory.device_segments import (
    DeviceMemoryError,
    DeviceMemoryFullError,
    DeviceSegment,
    ShareableDevice,
)

from tests.service.memory.fake_driver import GRANULARITY, TOTAL, FakeDriver


@pytest.fixture
def driver():
    gc.collect()
    made = FakeDriver()
    # Of other tests something may be left.
    made.before = made.bytes_in_use
    return made


@pytest.fixture
def device(driver):
    return ShareableDevice(0, driver)


def test_what_one_writes_the_other_reads(driver, device):
    client = FakeDriver(b"v" * 16, b"u" * 16)
    segment = device.allocate_zeroed(100, DeviceSegment)
    assert len(segment) == GRANULARITY
    descriptor = device.export_descriptor(segment)
    assert not os.get_inheritable(descriptor)
    found = ShareableDevice.find_by_uuid(device.uuid, client)
    assert found.ordinal == 1
    opened = found.map_descriptor(descriptor, len(segment), DeviceSegment)
    os.close(descriptor)
    client.content(opened.address)[:3] = b"abc"
    assert driver.content(segment.address)[:4] == b"abc\0"


def test_new_memory_is_cleared_before_anybody_gets_it(driver, device):
    segment = device.allocate_zeroed(GRANULARITY, DeviceSegment)
    assert driver.content(segment.address).raw == bytes(GRANULARITY)
    assert driver.calls.index("cuStreamSynchronize") > driver.calls.index("cuMemsetD8")


def test_memory_goes_once_neither_side_has_it(driver, device):
    client = ShareableDevice(0, FakeDriver())
    segment = device.allocate_zeroed(1, DeviceSegment)
    descriptor = device.export_descriptor(segment)
    opened = client.map_descriptor(descriptor, GRANULARITY, DeviceSegment)
    os.close(descriptor)
    view = segment.view()[16:32]
    del segment
    gc.collect()
    assert driver.mappings
    del view
    gc.collect()
    assert not driver.mappings
    assert not driver.reserved
    assert not driver.handles
    assert driver.bytes_in_use == driver.before + GRANULARITY
    assert opened.device is client
    del opened
    gc.collect()
    assert driver.bytes_in_use == driver.before


@pytest.mark.parametrize("name", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemsetD8"])
def test_what_fails_halfway_leaves_nothing(driver, device, name):
    driver.refusals[name] = 1
    with pytest.raises(DeviceMemoryError, match="failed: 1"):
        device.allocate_zeroed(1, DeviceSegment)
    driver.refusals.clear()
    gc.collect()
    assert driver.bytes_in_use == driver.before
    assert not driver.reserved
    assert not driver.handles
    assert not driver.mappings


def test_a_full_device_is_told_apart(driver, device):
    with pytest.raises(DeviceMemoryFullError):
        device.allocate_zeroed(TOTAL + 1, DeviceSegment)


def test_what_is_no_such_memory_is_not_mapped(driver, device):
    descriptor = os.memfd_create("plain")
    with pytest.raises(DeviceMemoryError):
        device.map_descriptor(descriptor, GRANULARITY, DeviceSegment)
    os.close(descriptor)
    segment = device.allocate_zeroed(1, DeviceSegment)
    descriptor = device.export_descriptor(segment)
    with pytest.raises(DeviceMemoryError):
        device.map_descriptor(descriptor, 2 * GRANULARITY, DeviceSegment)
    os.close(descriptor)
    assert len(driver.handles) == 1


def test_devices_without_it(driver):
    driver.attribute = 0
    with pytest.raises(DeviceMemoryError, match="descriptor"):
        ShareableDevice(0, driver)
    driver.attribute = 1
    driver.refusals["cuInit"] = 100
    with pytest.raises(DeviceMemoryError, match="100"):
        ShareableDevice(0, driver)
    with pytest.raises(DeviceMemoryError, match="does not see"):
        ShareableDevice.find_by_uuid("00" * 16, FakeDriver())


def test_views_are_pieces_of_the_segment(device):
    whole = device.allocate_zeroed(1, DeviceSegment).view()
    piece = whole[64:128][16:32]
    assert len(piece) == 16
    assert piece.obj is whole.obj
    assert piece.__cuda_array_interface__["data"] == (whole.obj.address + 80, False)
    assert len(whole[128:64]) == 0
    assert len(whole[GRANULARITY:]) == 0
    with pytest.raises(ValueError, match="step"):
        whole[::2]
    with pytest.raises(TypeError):
        memoryview(whole)
    with pytest.raises(TypeError):
        bytes(whole)
