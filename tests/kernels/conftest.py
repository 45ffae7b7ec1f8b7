"""Where kernel tests run, and what they run on."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fusednorm.api import autograd, chain, group_norm, layer_norm
from fusednorm.host.background_build import ensure_extension_built
from fusednorm.host.extension_files import ExtensionFiles
from fusednorm.launch import replay_cache
from fusednorm.launch.extension_calls import configure_extension
from fusednorm.launch.launches import Launch

from tests.kernels.launch.replaying import Replaying, drive, note_plans, note_workspaces


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU where there is one, else the CPU, where kernels are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def interpreted(interpreter: None) -> None:
    """Every test may run kernels."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same fresh random data in every run."""
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test's first call of a kind is planned, by what the test has put in place.

    No test looks for the host extension unless it says so.
    """
    replay_cache.clear_replays()
    monkeypatch.setattr(replay_cache, "_load", None)
    monkeypatch.setattr(replay_cache, "_KNOWN", {})


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Replaying:
    """The driver that takes the launches of repeated calls."""
    return drive(monkeypatch)


@pytest.fixture(scope="session")
def host_extension() -> Any:
    """The host extension, compiled where it was not yet."""
    ensure_extension_built()
    return ExtensionFiles().try_load_compiled_module()


@pytest.fixture
def natively(host_extension: Any, replaying: Replaying, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replaying]:
    """The driver that takes the launches of repeated calls, which the host extension makes."""
    configure_extension(host_extension, autograd._compute_gradients, replay_cache.MAX_KINDS, replaying.launch)
    host_extension.clear_replays()
    replaying.workspaces = note_workspaces(
        monkeypatch, "fusednorm.launch.extension_calls.get_or_allocate_stream_workspace", stream=0
    )
    monkeypatch.setattr(replay_cache, "_extension", None)
    replay_cache.set_extension(host_extension)
    # It is the extension that repeats, or nobody.
    monkeypatch.setattr(replay_cache.ReplayablePass, "_find_replay", lambda *_: None)
    yield replaying
    host_extension.clear_replays()


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[list[Launch]]:
    """Plans of the calls that go the long way."""
    return note_plans(monkeypatch, layer_norm, group_norm, chain)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory is full of NaN, so an element that no kernel writes fails the comparison."""

    def poison(allocate):
        def allocate_nan(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate_nan

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    return
