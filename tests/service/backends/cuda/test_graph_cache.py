"""Which calls are replayed, on graphs that make the call they were captured from."""

import gc
import weakref

import pytest
from normserve.backends.cuda import graph_cache
from normserve.backends.cuda.graph_cache import GraphCache, RepeatedCall

from tests.service.backends.fake_graphs import FakeGraphs

SOON = 3


@pytest.fixture
def graphs():
    return FakeGraphs()


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(graph_cache, "_CALLS_BEFORE_CAPTURE", SOON)


class Scene:
    """One call, as the backend makes it.

    Attributes:
        made: how often it was made or replayed.
    """

    def __init__(self, shared):
        self.made = 0
        self.repeated = RepeatedCall(self._call, "this call", shared)

    def _call(self):
        self.made += 1

    def send(self, times=1):
        for _ in range(times):
            self.repeated.run()
            if self.repeated.is_capture_due:
                self.repeated.capture()


@pytest.fixture
def scene(graphs):
    return Scene(GraphCache(graphs))


def test_a_call_that_recurs_is_captured_once_and_replayed_from_then_on(scene, graphs):
    scene.send(SOON - 1)
    assert graphs.captured == 0
    scene.send()
    assert (graphs.captured, graphs.replayed) == (1, 0)
    # The capture made no call of its own.
    assert scene.made == SOON
    scene.send(5)
    assert (graphs.captured, graphs.replayed) == (1, 5)
    assert scene.made == SOON + 5


@pytest.mark.parametrize("error", [RuntimeError("not while a stream captures"), MemoryError("dry")])
def test_a_capture_that_fails_is_logged_once_and_the_call_made_as_before(scene, graphs, caplog, error):
    graphs.broken = lambda: error
    scene.send(SOON)
    graphs.broken = None
    scene.send(3 * SOON)
    assert scene.made == 4 * SOON
    assert (graphs.captured, graphs.replayed) == (0, 0)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "this call" in record.getMessage()
    assert str(error) in record.getMessage()


def test_a_failed_capture_keeps_nothing_of_its_call(graphs, caplog):
    graphs.broken = lambda: RuntimeError("no")
    scene = Scene(GraphCache(graphs))
    scene.send(SOON)
    collected = weakref.ref(scene)
    del scene
    gc.collect()
    assert caplog.records
    assert collected() is None


def test_a_replay_that_fails_is_made_as_a_call_and_stays_one(scene, graphs, caplog):
    scene.send(SOON)
    graphs.broken_replay = lambda: RuntimeError("no room for it")
    scene.send(SOON)
    graphs.broken_replay = None
    scene.send(SOON)
    assert scene.made == 3 * SOON
    assert (graphs.captured, graphs.replayed) == (1, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_the_call_itself_raises_is_the_callers(graphs):
    def fail():
        raise RuntimeError("CUDA error: unspecified launch failure")

    repeated = RepeatedCall(fail, "it", GraphCache(graphs))
    for _ in range(2 * SOON):
        with pytest.raises(RuntimeError, match="launch failure"):
            repeated.run()
        assert not repeated.is_capture_due


def test_so_many_graphs_live_and_the_oldest_goes(graphs, monkeypatch):
    monkeypatch.setattr(graph_cache, "_MOST_GRAPHS", 4)
    shared = GraphCache(graphs)
    scenes = [Scene(shared) for _ in range(6)]
    for scene in scenes:
        scene.send(SOON)
    assert [scene.repeated.graph is None for scene in scenes] == [True, True, False, False, False, False]
    # A call that lost its graph gets another one as it got the first.
    scenes[0].send(SOON - 1)
    assert graphs.captured == 6
    scenes[0].send(2)
    assert (graphs.captured, graphs.replayed) == (7, 1)
    assert scenes[2].repeated.graph is None


def test_graphs_of_calls_that_are_gone_make_room(graphs, monkeypatch):
    monkeypatch.setattr(graph_cache, "_MOST_GRAPHS", 2)
    shared = GraphCache(graphs)
    kept = Scene(shared)
    kept.send(SOON)
    for _ in range(5):
        Scene(shared).send(SOON)
        gc.collect()
    kept.send()
    assert graphs.replayed == 1


def test_captures_stay_rare_whatever_comes(graphs, monkeypatch):
    """Calls in turn, as many as make each graph useless as soon as it is there."""
    monkeypatch.setattr(graph_cache, "_MOST_GRAPHS", 2)
    shared = GraphCache(graphs)
    scenes = [Scene(shared) for _ in range(5)]
    for _ in range(10):
        for scene in scenes:
            scene.send(SOON + 1)
    made = sum(scene.made for scene in scenes)
    assert made == 50 * (SOON + 1)
    assert graphs.captured <= made / SOON
    assert sum(scene.repeated.graph is not None for scene in scenes) <= 2
