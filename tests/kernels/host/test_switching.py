"""When a process looks for the host extension, and what its calls are before and after it is there."""

import fusednorm
import pytest
import torch
from fusednorm.api import autograd
from fusednorm.devices.device_properties import INTERPRETED
from fusednorm.launch import extension_calls, replay_cache
from fusednorm.launch.extension_calls import configure_extension
from fusednorm.results import Forward

from tests.kernels.launch.replaying import note_workspaces
from tests.kernels.ops.layer_norm.replays.operands import Operands

# Its driver stands in for one that is absent; test_gpu.py has the real one.
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs interpreted kernels")


class Looks:
    """What is asked about the extension; `extension` is what is there, `captures` whether a graph is captured."""

    def __init__(self):
        self.may_build = []
        self.extension = None
        self.captures = False

    def load(self, may_build):
        self.may_build.append(may_build)
        return self.extension


@pytest.fixture
def looks(replaying, monkeypatch):
    looks = Looks()
    replaying.runs = True
    monkeypatch.setattr(replay_cache, "is_capturing", lambda: looks.captures)
    monkeypatch.setattr(replay_cache, "_extension", None)
    monkeypatch.setattr(replay_cache, "_replays", 0)
    monkeypatch.setattr(replay_cache, "_LOOK_EVERY", 3)
    monkeypatch.setattr(replay_cache, "_load", looks.load)
    return looks


def forward(eps=1e-5):
    fusednorm.layer_norm_forward(torch.zeros(2, 48), eps=eps)


def test_plans_look_and_every_some_replays_may_build(looks):
    for eps in (1.0, 2.0):
        forward(eps)
    assert looks.may_build == [False, False]
    for _ in range(2):
        forward(1.0)
    assert looks.may_build == [False, False]
    forward(2.0)
    assert looks.may_build == [False, False, True]
    for _ in range(6):
        forward(1.0)
    assert looks.may_build == [False, False, True, True, True]


def test_nothing_is_looked_for_or_built_while_a_graph_is_captured(looks):
    looks.captures = True
    for _ in range(10):
        forward()
    assert not looks.may_build
    looks.captures = False
    for _ in range(3):
        forward()
    assert looks.may_build == [True]


def test_who_does_without_the_extension_looks_for_none(looks):
    replay_cache.set_extension(None)
    for _ in range(10):
        forward()
    assert not looks.may_build
    assert not replay_cache.is_extension_pending()


def test_one_thread_looks_at_a_time(looks, monkeypatch):
    monkeypatch.setattr(replay_cache, "_load", lambda may_build: looks.load(may_build) or forward(2.0))
    forward()
    assert looks.may_build == [False]


@pytest.mark.parametrize("pass_", ["layer_norm_forward", "rms_norm_backward"])
@pytest.mark.parametrize("at", ["a plan", "a replay"])
def test_a_process_goes_on_with_the_extension_once_it_is_there(
    at, pass_, looks, replaying, host_extension, poisoned, monkeypatch
):
    by_extension = []

    def launch(*arguments):
        by_extension.append(arguments)
        replaying.launch(*arguments)

    configure_extension(host_extension, autograd._compute_gradients, replay_cache.MAX_KINDS, launch)
    host_extension.clear_replays()
    note_workspaces(monkeypatch)
    note_workspaces(monkeypatch, "fusednorm.launch.extension_calls.get_or_allocate_stream_workspace", stream=0)
    operands = Operands(5, 48)
    planned = operands.call(pass_)
    assert equal(operands.call(pass_), planned)
    looks.extension = host_extension
    if at == "a plan":
        forward(7.0)
    while replay_cache.get_extension() is None:
        assert equal(operands.call(pass_), planned)
    assert not by_extension
    looked = len(looks.may_build)
    # Planned once more, for the extension to learn.
    assert equal(operands.call(pass_), planned)
    for count in range(1, 10):
        assert equal(operands.call(pass_), planned)
        assert len(by_extension) == count * (2 if "backward" in pass_ else 1)
    assert len(looks.may_build) == looked
    host_extension.clear_replays()


def test_passes_defined_before_and_after_the_extension_is_there_have_numbers(looks, host_extension, monkeypatch):
    monkeypatch.setattr(replay_cache, "_PASSES", [])
    before = replay_cache.ReplayablePass(Forward)
    assert before.extension_number < 0
    replay_cache.set_extension(host_extension)
    after = replay_cache.ReplayablePass(Forward)
    assert 0 <= before.extension_number < after.extension_number


@pytest.mark.parametrize("number", [-1, 1 << 20])
def test_a_number_that_no_pass_has_is_an_error(number, host_extension):
    inputs, nothing = (torch.zeros(2, 48),), ()
    with pytest.raises(RuntimeError, match="range_check"):
        host_extension.record_replay(number, 0, ("x",), inputs, True, -1, 0, *([nothing] * 5))
    with pytest.raises(RuntimeError, match="range_check"):
        host_extension.replay(number, 0, ("x",), inputs, Forward)


def equal(results, wanted):
    return all(result is other or torch.equal(result, other) for result, other in zip(results, wanted, strict=True))


@pytest.fixture
def files(monkeypatch):
    """Replaces the files of the extension; `found` is what is there."""

    class Files:
        found, failure = None, None

        def try_load_compiled_module(self):
            if self.failure:
                raise self.failure
            return self.found

        def find_compiled(self):
            return self.found

    monkeypatch.setattr(extension_calls, "_files", Files())
    monkeypatch.setattr(extension_calls, "_load_error", "")
    return extension_calls._files


class Build:
    def __init__(self):
        self.advanced, self.runs = 0, False

    def is_running(self):
        return self.runs

    def start_if_needed(self):
        self.advanced += 1


@pytest.fixture
def build(monkeypatch):
    monkeypatch.setattr(extension_calls, "_build", Build())
    return extension_calls._build


def test_an_extension_is_built_only_where_that_is_allowed_and_it_is_not_there(files, build, monkeypatch):
    assert extension_calls.load_extension(1) is None
    assert build.advanced == 0
    assert extension_calls.load_extension(1, True) is None
    assert build.advanced == 1
    monkeypatch.setattr(extension_calls, "configure_extension", lambda *_: None)
    files.found = "the extension"
    assert extension_calls.load_extension(1, True) == "the extension"
    assert build.advanced == 1


def test_an_extension_is_loaded_after_the_end_of_its_builder(files, build, monkeypatch):
    """So that its builder is not left unreaped."""
    monkeypatch.setattr(extension_calls, "configure_extension", lambda *_: None)
    files.found, build.runs = "the extension", True
    assert extension_calls.load_extension(1, True) is None
    build.runs = False
    assert extension_calls.load_extension(1, True) == "the extension"


@pytest.mark.parametrize("failure", [ImportError("other libraries"), PermissionError("of another user")])
def test_an_extension_that_does_not_load_is_named_once(failure, files, build):
    files.failure = failure
    with pytest.warns(UserWarning, match=f"does not load, so calls cost more host time: {failure}"):
        assert extension_calls.load_extension(1, True) is None
    assert extension_calls.load_extension(1, True) is None
    assert build.advanced == 0
    assert extension_calls.find_extension_status() == (False, f"the host extension does not load: {failure}")
