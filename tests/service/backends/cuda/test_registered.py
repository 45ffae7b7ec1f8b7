"""Which of the host's memory the driver knows, with a driver that takes notes."""

import gc
from types import SimpleNamespace

import pytest
import torch
from normserve.backends.cuda import pinned
from normserve.backends.cuda.pinned import HostMemoryRegistration, is_registered, try_register_memory


@pytest.fixture
def driver(monkeypatch):
    """The driver's calls; it refuses where `code` says so."""
    made = SimpleNamespace(known={}, code=0)

    def register(address, nbytes, flags):
        if not made.code:
            made.known[address] = nbytes
        return made.code

    def check(code):
        if code:
            raise RuntimeError(f"error {code}")

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=made.known.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(HostMemoryRegistration, "nbytes_by_address", {})
    return made


@pytest.fixture
def memory():
    return memoryview(bytearray(4096))


def test_memory_is_known_for_as_long_as_it_is_registered(driver, memory):
    registration = try_register_memory(memory)
    assert list(driver.known.values()) == [4096]
    for part in (memory, memory[:1], memory[-1:], memory[100:200]):
        assert is_registered(part)
    del registration
    gc.collect()
    assert not driver.known
    assert not is_registered(memory[100:200])


def test_what_lies_only_partly_in_such_memory_is_not(driver, memory):
    registration = try_register_memory(memory[1024:2048])
    assert is_registered(memory[1024:2048])
    for part in (memory[1023:2048], memory[1024:2049], memory[:1024], memory[2048:], memory[:]):
        assert not is_registered(part)
    del registration


def test_memory_that_the_driver_refuses_is_used_without_it(driver, memory, caplog):
    driver.code = 2
    assert try_register_memory(memory) is None
    assert not is_registered(memory)
    assert len(caplog.records) == 1
    with pytest.raises(RuntimeError, match="error 2"):
        HostMemoryRegistration(memory)
    gc.collect()
    assert not driver.known


def test_a_slab_that_cannot_be_pinned_is_a_want_of_memory(driver, memory):
    driver.code = 2
    with pytest.raises(MemoryError):
        pinned.make_pinned_allocator(lambda nbytes: memory)(1000)
