"""Decides, before any kernel is imported, whether kernels run on a GPU or in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, tests that need one are left out of the run."""
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needs_gpu)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
