"""What a client offers of its own memory of the device, when, and for how long; that memory is the host's here."""

import gc

import pytest
import torch
from normserve.client.local import device
from normserve.client.local.device import DeviceArena
from normserve.client.local.device_messages import prepare_on_device
from normserve.client.local.own_memory import Offer
from normserve.codec import local_frames as frames
from normserve.memory.device_segments import Device

from tests.service.client.local.fake_cuda import FakeTorch
from tests.service.client.local.test_device import OnFake, call_of, finished, grow
from tests.service.memory.fake_driver import GRANULARITY, FakeDriver, bytes_at

NBYTES = 2**21
OWN = 9


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def arena(driver, monkeypatch):
    monkeypatch.setattr(device.importlib, "import_module", lambda name: FakeTorch())
    made = DeviceArena(Device(0, driver), is_own_opened=True)
    grow(made, Device(0, FakeDriver()), 3)
    return made


@pytest.fixture
def own(arena):
    return arena.own


def tensor_at(address, *shape):
    count = torch.Size(shape).numel()
    return torch.frombuffer(bytes_at(address, 4 * count), dtype=torch.float32).view(shape)


def found(own, tensor):
    return own.find(OnFake(tensor))


def accept(own, tensor, number=OWN):
    offer = found(own, tensor)
    assert isinstance(offer, Offer)
    offer.take_answer(frames.Answer(200, opened=number))
    return offer


def test_an_allocation_is_offered_once_for_all_that_lies_there(own, driver):
    address = driver.allocate(NBYTES)
    first, second = tensor_at(address + 4096, 4, 256), tensor_at(address + 2**16, 4, 256)
    offer = accept(own, first)
    assert offer.message.nbytes == NBYTES
    assert bytes.fromhex(offer.message.handle) == driver.cuIpcGetMemHandle(address)[1].content.raw
    assert found(own, first) == (OWN, 4096)
    assert found(own, second) == (OWN, 2**16)
    assert found(own, first[2:]) == (OWN, 4096 + 2048)


def test_it_is_withdrawn_once_no_storage_of_it_is_left(own, driver):
    address = driver.allocate(NBYTES)
    first, second = tensor_at(address, 4), tensor_at(address + 64, 4)
    accept(own, first)
    found(own, second)
    view = first[1:]
    del first, second
    gc.collect()
    assert own.withdrawn() == []
    assert not own.is_idle
    del view
    gc.collect()
    assert own.is_idle
    assert own.withdrawn() == [OWN]
    assert not own.is_idle
    assert isinstance(found(own, tensor_at(address, 4)), Offer)


def test_the_next_tensor_there_keeps_it(own, driver):
    address = driver.allocate(NBYTES)
    first = tensor_at(address, 4)
    accept(own, first)
    del first
    gc.collect()
    second = tensor_at(address, 4)
    assert found(own, second) == (OWN, 0)
    assert own.withdrawn() == []
    del second
    gc.collect()
    assert own.withdrawn() == [OWN]


def test_an_address_that_is_allocated_again_is_offered_again(own, driver):
    address = driver.allocate(NBYTES)
    tensor = tensor_at(address, 4)
    accept(own, tensor)
    known = driver.allocations[address]
    # As the driver does where something else comes to lie at the same address.
    known.identity += 10**6
    assert isinstance(found(own, tensor), Offer)


def test_two_threads_that_offer_the_same_leave_one(own, driver):
    tensor = tensor_at(driver.allocate(NBYTES), 4)
    offers = [found(own, tensor), found(own, tensor)]
    for number, offer in enumerate(offers, OWN):
        offer.take_answer(frames.Answer(200, opened=number))
    assert found(own, tensor) == (OWN, 0)
    assert own.withdrawn() == [OWN + 1]


def test_expandable_segments_are_copied_and_not_asked_for_again(own, driver, caplog):
    tensor = tensor_at(driver.allocate(NBYTES, is_expandable=True), 4)
    assert found(own, tensor) is None
    driver.calls.clear()
    assert found(own, tensor) is None
    assert driver.calls.count("cuPointerGetAttribute") == 1
    assert ["copied" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(("status", "is_offered"), [(403, False), (422, False), (429, True)])
def test_what_the_server_refuses_is_copied(own, driver, status, is_offered):
    tensor = tensor_at(driver.allocate(NBYTES), 4)
    found(own, tensor).take_answer(frames.Answer(status, problem={"detail": "no"}))
    assert isinstance(found(own, tensor), Offer) is is_offered
    other = tensor_at(driver.allocate(NBYTES), 4)
    assert isinstance(found(own, other), Offer) is (status != 403)


def test_there_are_only_so_many(own, driver):
    tensors = [tensor_at(driver.allocate(4096), 4) for _ in range(65)]
    for number, tensor in enumerate(tensors[:64]):
        accept(own, tensor, number)
    assert found(own, tensors[64]) is None
    del tensors[0], tensor
    gc.collect()
    assert own.withdrawn() == [0]
    assert isinstance(found(own, tensors[-1]), Offer)


def test_at_the_end_all_are_withdrawn(own, driver):
    tensors = [tensor_at(driver.allocate(4096), 4) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        accept(own, tensor, number)
    assert own.withdraw_all() == [0, 1, 2]
    assert found(own, tensors[0]) is None


def test_calls_name_it_keep_it_and_put_results_into_the_arena(arena, driver):
    x = tensor_at(driver.allocate(NBYTES), 4, 256)
    needs = prepare_on_device(call_of(x, weight=torch.ones(256)), arena)
    offer = next(needs)
    assert isinstance(offer, Offer)
    offer.take_answer(frames.Answer(200, opened=OWN))
    prepared = finished(needs)
    message = prepared.message
    assert message.tensors["x"] == frames.Located(OWN, 0, "float32", (4, 256))
    assert message.tensors["weight"].segment == message.results["y"].segment == 3
    del x, needs, offer
    gc.collect()
    # Whoever waited may have given up: the server reads there until it has answered.
    assert arena.own.withdrawn() == []
    del prepared
    gc.collect()
    assert arena.own.withdrawn() == [OWN]


@pytest.mark.parametrize("kind", ["strided", "unaligned", "elsewhere", "refused"])
def test_other_tensors_are_copied(arena, driver, kind):
    address = driver.allocate(GRANULARITY)
    x = tensor_at(address + (4 if kind == "unaligned" else 0), 4, 64)
    if kind == "strided":
        x = x[:, ::2]
    if kind == "elsewhere":
        x = torch.ones(4, 64)
    needs = prepare_on_device(call_of(x), arena)
    if kind == "refused":
        next(needs).take_answer(frames.Answer(422, problem={"detail": "no"}))
    assert finished(needs).message.tensors["x"].segment == 3
