"""A plugin of pytest: the packages run with another default dtype and device of torch than the tests themselves.

`make test-defaults` uses it.  torch's default dtype is bfloat16, and a tensor for which a package names no device
is on "meta", while tests, and torch itself, make float32 tensors on the CPU as always.  A default device of torch's
own would be a mode, under which the packages take other paths.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

DTYPE, DEVICE = torch.bfloat16, "meta"
PACKAGES = ("fusednorm", "normserve", "normload")
FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
)


@pytest.fixture(autouse=True)
def other_defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test with the other defaults."""
    for name in FACTORIES:
        monkeypatch.setattr(torch, name, _by_caller(getattr(torch, name)))
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    yield
    torch.set_default_dtype(before)


def _by_caller(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory that uses the other defaults for the packages, and torch's own for all other callers."""

    def make_for_caller(*args: Any, **kwargs: Any) -> torch.Tensor:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] in PACKAGES:
            return make(*args, **{"device": DEVICE} | kwargs)
        torch.set_default_dtype(torch.float32)
        try:
            return make(*args, **kwargs)
        finally:
            torch.set_default_dtype(DTYPE)

    return make_for_caller
