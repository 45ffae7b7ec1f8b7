import pytest
import torch


@pytest.fixture
def float_device(device):
    """The device and the widest dtype that its passes take."""
    return device, torch.float32 if device.type == "cuda" else torch.float64
