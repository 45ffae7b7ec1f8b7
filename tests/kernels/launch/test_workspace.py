"""Whose workspace a launch gets, on a device that is absent."""

from types import SimpleNamespace

import pytest
import torch
from fusednorm.launch import workspace

DEVICES = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch):
    """The current stream, its device's memory on the host."""
    stream = SimpleNamespace(cuda_stream=70, captures=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda words, dtype, device: zeros(words, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.captures)
    workspace._kept.cache_clear()
    yield stream
    workspace._kept.cache_clear()


def test_a_stream_of_a_device_has_one_exchange_buffer_of_a_size(current):
    planned = workspace.exchange_buffer(DEVICES[0], 5)
    assert workspace.workspace_of(DEVICES[0], 70, planned.numel(), "exchange_buffer") is planned
    assert workspace.exchange_buffer(DEVICES[0], 5) is planned
    others = [
        workspace.workspace_of(DEVICES[0], 71, planned.numel(), "exchange_buffer"),
        workspace.workspace_of(DEVICES[1], 70, planned.numel(), "exchange_buffer"),
        workspace.exchange_buffer(DEVICES[0], 500),
        workspace.counters(DEVICES[0], 22),
    ]
    assert len({box.data_ptr() for box in (planned, *others)}) == 5
    current.cuda_stream = 71
    assert workspace.exchange_buffer(DEVICES[0], 5) is others[0]


def test_a_captured_launch_has_an_exchange_buffer_of_its_own(current):
    planned = workspace.exchange_buffer(DEVICES[0], 5)
    current.captures = True
    captured = [
        workspace.workspace_of(DEVICES[0], 70, planned.numel(), "exchange_buffer"),
        workspace.exchange_buffer(DEVICES[0], 5),
    ]
    assert len({box.data_ptr() for box in (planned, *captured)}) == 3
    for box in captured:
        assert box.numel() == planned.numel()
        assert not box.any()


def test_a_workspace_knows_what_it_is_for(current):
    assert workspace.purpose_of(workspace.exchange_buffer(DEVICES[0], 5)) == "exchange_buffer"
    assert workspace.purpose_of(workspace.counters(DEVICES[0], 5)) == "counters"
    current.captures = True
    assert workspace.purpose_of(workspace.counters(DEVICES[0], 5)) == "counters"
    assert workspace.purpose_of(torch.empty(64, dtype=torch.int64)) is None
