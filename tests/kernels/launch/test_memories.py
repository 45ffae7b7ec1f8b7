"""Which tensor an array of a plan stands for, on a device that is absent."""

from types import SimpleNamespace

import pytest
import torch
from fusednorm.arguments.arrays import new_workspace
from fusednorm.devices.device_properties import H200
from fusednorm.launch import memories
from fusednorm.launch.memories import PlanTensors
from fusednorm.launch.workspaces import get_counters, get_exchange_buffer
from fusednorm.tensors.arrays import describe_as_array

DEVICES = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch):
    """The current stream, its device's memory on the host."""
    stream = SimpleNamespace(cuda_stream=70, captures=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda words, dtype, device: zeros(words, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.captures)
    memories._kept.cache_clear()
    yield stream
    memories._kept.cache_clear()


def bind(array, device=DEVICES[0]):
    """The tensor of an array in a new call."""
    (tensor,) = PlanTensors(device, {}).bind((array,))
    return tensor


def test_a_stream_of_a_device_has_one_exchange_buffer_of_a_size(current):
    planned = bind(get_exchange_buffer(H200, 5))
    assert memories.get_or_allocate_stream_workspace(DEVICES[0], 70, planned.numel(), "exchange_buffer") is planned
    assert bind(get_exchange_buffer(H200, 5)) is planned
    others = [
        memories.get_or_allocate_stream_workspace(DEVICES[0], 71, planned.numel(), "exchange_buffer"),
        memories.get_or_allocate_stream_workspace(DEVICES[1], 70, planned.numel(), "exchange_buffer"),
        bind(get_exchange_buffer(H200, 500)),
        bind(get_counters(H200, 22)),
    ]
    assert len({box.data_ptr() for box in (planned, *others)}) == 5
    current.cuda_stream = 71
    assert bind(get_exchange_buffer(H200, 5)) is others[0]


def test_a_captured_launch_has_an_exchange_buffer_of_its_own(current):
    planned = bind(get_exchange_buffer(H200, 5))
    current.captures = True
    captured = [
        memories.get_or_allocate_stream_workspace(DEVICES[0], 70, planned.numel(), "exchange_buffer"),
        bind(get_exchange_buffer(H200, 5)),
    ]
    assert len({box.data_ptr() for box in (planned, *captured)}) == 3
    for box in captured:
        assert box.numel() == planned.numel()
        assert not box.any()


def test_parts_of_a_workspace_lie_one_after_another():
    x = torch.zeros(3, 8)
    first, second = new_workspace(describe_as_array("x", x), 2, 3, 5).unbind()
    own = PlanTensors(x.device, {"x": x})
    one, (other, none), given, number = own.bind((first, (second, None), describe_as_array("x", x), 7))
    assert other.data_ptr() - one.data_ptr() == 4 * 15
    assert (none, number) == (None, 7)
    assert given is x


def test_a_name_without_a_tensor_is_no_workspace():
    with pytest.raises(KeyError, match="weight"):
        bind(describe_as_array("weight", torch.zeros(3)), torch.device("cpu"))
