"""Decides, before any kernel is imported, whether kernels run on a GPU or in Triton's interpreter."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def float8_is_rounded_as_on_a_gpu() -> Iterator[None]:
    """To nearest even, saturating; the interpreter's own conversion loses carries and makes a number of NaN."""
    from triton import knobs
    from triton.runtime import interpreter

    if not knobs.runtime.interpret:
        yield
        return
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding):
        if not target.is_fp8e4nv():
            return convert(data, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(data)).clamp(-448, 448)
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_float)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, tests that need one are left out of the run."""
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needs_gpu)
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
