"""Pinned memory, of which the device has an address; needs a GPU."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_device_sees_pinned_memory_where_it_lies():
    from normserve.backends.cuda.pinned import pinned_memory

    with torch.inference_mode():
        memory = pinned_memory(1 << 16)
    assert not memory.on_device.is_inference()
    assert memory.on_device.is_cuda
    assert memory.on_device.data_ptr() == memory.ctypes.data
    memory[:] = torch.arange(1 << 16).to(torch.uint8).numpy()
    assert torch.equal(memory.on_device.cpu(), torch.arange(1 << 16).to(torch.uint8))
    memory.on_device[100:200] = 7
    torch.cuda.synchronize()
    assert set(memory[100:200].tolist()) == {7}
