"""Whose mailbox a launch gets, on a device that is absent."""

from types import SimpleNamespace

import pytest
import torch
from fusednorm.launch import launch

DEVICES = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch):
    """The current stream, its device's memory on the host."""
    stream = SimpleNamespace(cuda_stream=70, captures=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda words, dtype, device: zeros(words, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.captures)
    launch._zeros.cache_clear()
    yield stream
    launch._zeros.cache_clear()


def test_a_stream_of_a_device_has_one_mailbox_of_a_size(current):
    planned = launch.mailbox(DEVICES[0], 5)
    assert launch.mailbox_again(DEVICES[0], 70, planned.numel()) is planned
    assert launch.mailbox(DEVICES[0], 5) is planned
    others = [
        launch.mailbox_again(DEVICES[0], 71, planned.numel()),
        launch.mailbox_again(DEVICES[1], 70, planned.numel()),
        launch.mailbox(DEVICES[0], 500),
        launch.counters(DEVICES[0], 22),
    ]
    assert len({box.data_ptr() for box in (planned, *others)}) == 5
    current.cuda_stream = 71
    assert launch.mailbox(DEVICES[0], 5) is others[0]


def test_a_captured_launch_has_a_mailbox_of_its_own(current):
    planned = launch.mailbox(DEVICES[0], 5)
    current.captures = True
    captured = [launch.mailbox_again(DEVICES[0], 70, planned.numel()), launch.mailbox(DEVICES[0], 5)]
    assert len({box.data_ptr() for box in (planned, *captured)}) == 3
    for box in captured:
        assert box.numel() == planned.numel()
        assert not box.any()
