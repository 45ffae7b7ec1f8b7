"""Which calls are replayed, on graphs that make the call they were captured from."""

import functools
import gc
import weakref

import pytest
from normserve.backends.cuda import replays
from normserve.backends.cuda.replays import RepeatedByLayer, Replays

from tests.service.backends.fake_graphs import FakeGraphs

SOON = 3


@pytest.fixture
def graphs():
    return FakeGraphs()


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(replays, "_CALLS_BEFORE_CAPTURE", SOON)


class Parameters:
    """A layer's, by whose number a call can be told from another's."""

    def __init__(self, number):
        self.by_name = {"weight": number}


def _call(made, weight=None):
    made.append(weight)


class Scene:
    """One call on one slab, as the backend makes it.

    Attributes:
        made: the weight of each call that was made or replayed.
    """

    def __init__(self, all_replays):
        self.made = []
        self.calls = RepeatedByLayer(functools.partial(_call, self.made), "this call", all_replays)

    def send(self, resident=None, times=1):
        for _ in range(times):
            repeated = self.calls.of(resident)
            parameters = {} if resident is None else resident.by_name
            repeated.make(parameters)
            if repeated.is_due:
                repeated.capture(parameters)


@pytest.fixture
def scene(graphs):
    return Scene(Replays(graphs))


def test_what_comes_again_is_captured_once_and_replayed_from_then_on(scene, graphs):
    scene.send(times=SOON - 1)
    assert graphs.captured == 0
    scene.send()
    assert (graphs.captured, graphs.replayed) == (1, 0)
    # The capture made no call of its own.
    assert len(scene.made) == SOON
    scene.send(times=5)
    assert (graphs.captured, graphs.replayed) == (1, 5)
    assert len(scene.made) == SOON + 5


def test_each_layer_is_counted_and_replayed_by_itself(scene, graphs):
    first, second = Parameters(1), Parameters(2)
    for _ in range(SOON):
        scene.send(first)
        scene.send(second)
        scene.send()
    assert (graphs.captured, graphs.replayed) == (3, 0)
    scene.made.clear()
    for resident in (second, None, first, second):
        scene.send(resident)
    assert scene.made == [2, None, 1, 2]
    assert graphs.replayed == 4


def test_nothing_keeps_a_layers_parameters_and_its_graph_goes_with_them(scene, graphs):
    resident = Parameters(1)
    scene.send(resident, SOON + 1)
    graph = weakref.ref(scene.calls.of(resident)._graph)
    gone = weakref.ref(resident)
    assert graph() is not None
    gc.disable()
    try:
        del resident
        assert gone() is graph() is None
    finally:
        gc.enable()
    scene.send(Parameters(2), SOON)
    assert scene.made[-1] == 2
    assert graphs.replayed == 1


@pytest.mark.parametrize("error", [RuntimeError("not while a stream captures"), MemoryError("dry")])
def test_capture_that_fails_is_told_once_and_the_call_made_as_before(scene, graphs, caplog, error):
    graphs.broken = lambda: error
    scene.send(times=SOON)
    graphs.broken = None
    scene.send(times=3 * SOON)
    assert len(scene.made) == 4 * SOON
    assert (graphs.captured, graphs.replayed) == (0, 0)
    (told,) = caplog.records
    assert told.levelname == "WARNING"
    assert "this call" in told.getMessage()
    assert str(error) in told.getMessage()
    # Another is captured nevertheless.
    scene.send(Parameters(1), SOON)
    assert graphs.captured == 1


def test_failed_capture_keeps_no_parameters(scene, graphs, caplog):
    graphs.broken = lambda: RuntimeError("no")
    resident = Parameters(1)
    scene.send(resident, SOON)
    gone = weakref.ref(resident)
    graphs.broken = None
    del resident
    gc.collect()
    assert caplog.records
    assert gone() is None


def test_replay_that_fails_is_made_as_a_call_and_stays_one(scene, graphs, caplog):
    scene.send(times=SOON)
    graphs.broken_replay = lambda: RuntimeError("no room for it")
    scene.send(times=SOON)
    graphs.broken_replay = None
    scene.send(times=SOON)
    assert len(scene.made) == 3 * SOON
    assert (graphs.captured, graphs.replayed) == (1, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_the_call_itself_raises_is_the_callers(graphs):
    def fail():
        raise RuntimeError("CUDA error: unspecified launch failure")

    repeated = RepeatedByLayer(fail, "it", Replays(graphs)).of(None)
    for _ in range(2 * SOON):
        with pytest.raises(RuntimeError, match="launch failure"):
            repeated.make({})
        assert not repeated.is_due


def test_so_many_graphs_live_and_the_oldest_goes(graphs, monkeypatch):
    monkeypatch.setattr(replays, "_MOST_GRAPHS", 4)
    shared = Replays(graphs)
    scenes = [Scene(shared) for _ in range(6)]
    for scene in scenes:
        scene.send(times=SOON)
    assert [scene.calls.of(None)._graph is None for scene in scenes] == [True, True, False, False, False, False]
    # What lost its graph earns another as it did the first.
    scenes[0].send(times=SOON - 1)
    assert graphs.captured == 6
    scenes[0].send(times=2)
    assert (graphs.captured, graphs.replayed) == (7, 1)
    assert scenes[2].calls.of(None)._graph is None


def test_graphs_that_went_with_their_slab_make_room(graphs, monkeypatch):
    monkeypatch.setattr(replays, "_MOST_GRAPHS", 2)
    shared = Replays(graphs)
    kept = Scene(shared)
    kept.send(times=SOON)
    for _ in range(5):
        Scene(shared).send(times=SOON)
    kept.send()
    assert graphs.replayed == 1


def test_captures_stay_rare_whatever_comes(graphs, monkeypatch):
    """Layers in turn, as many as are to make each graph useless as soon as it is there."""
    monkeypatch.setattr(replays, "_MOST_GRAPHS", 2)
    scene = Scene(Replays(graphs))
    layers = [Parameters(number) for number in range(5)]
    for _ in range(10):
        for resident in layers:
            scene.send(resident, SOON + 1)
    assert len(scene.made) == 50 * (SOON + 1)
    assert graphs.captured <= len(scene.made) / SOON
    assert sum(scene.calls.of(resident)._graph is not None for resident in layers) <= 2


def test_more_layers_than_are_counted(scene, graphs, monkeypatch):
    monkeypatch.setattr(replays, "_MOST_LAYERS", 4)
    layers = [Parameters(number) for number in range(5)]
    for _ in range(2 * SOON):
        for resident in layers:
            scene.send(resident)
    assert scene.made == [0, 1, 2, 3, 4] * 2 * SOON
    assert len(scene.calls._of_layers) <= 4
