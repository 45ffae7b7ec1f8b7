"""Pinned memory, of which the device has an address; needs a GPU."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_device_sees_pinned_memory_where_it_lies():
    from normserve.backends.cuda.pinned import allocate_pinned

    with torch.inference_mode():
        memory = allocate_pinned(1 << 16)
    assert not memory.device_tensor.is_inference()
    assert memory.device_tensor.is_cuda
    assert memory.device_tensor.data_ptr() == memory.ctypes.data
    memory[:] = torch.arange(1 << 16).to(torch.uint8).numpy()
    assert torch.equal(memory.device_tensor.cpu(), torch.arange(1 << 16).to(torch.uint8))
    memory.device_tensor[100:200] = 7
    torch.cuda.synchronize()
    assert set(memory[100:200].tolist()) == {7}


def test_shared_memory_is_known_to_the_driver_for_as_long_as_it_is_registered():
    import os

    from normserve.backends.cuda.pinned import is_registered, try_register_memory, view_on_device
    from normserve.memory.host_segments import HostSegment, make_segment

    descriptor, segment = make_segment(1 << 20, HostSegment)
    os.close(descriptor)
    with memoryview(segment) as memory:
        registration = try_register_memory(memory)
    seen = torch.frombuffer(segment, dtype=torch.uint8)
    assert registration is not None
    assert seen.is_pinned()
    with memoryview(segment) as whole, whole[1000:] as part:
        assert is_registered(whole)
        assert is_registered(part)
        assert view_on_device(part).data_ptr() == seen.data_ptr() + 1000
    assert not is_registered(memoryview(bytearray(1000)))
    seen.copy_(torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda"), non_blocking=True)
    torch.cuda.synchronize()
    assert set(seen.tolist()) == {7}
    del registration
    assert not seen.is_pinned()
    with memoryview(segment) as whole:
        assert not is_registered(whole)
