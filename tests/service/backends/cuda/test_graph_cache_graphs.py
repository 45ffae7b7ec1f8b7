"""How captures begin and end, on graphs that note what is done with them."""

import gc

import pytest
import torch
from normserve.backends.cuda.graph_cache import CudaGraphCapturer


class NotingGraph:
    """As torch's: it has a pool once its capture is over."""

    broken_begin = broken_end = False

    def __init__(self):
        self.has_ended = False

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.log.append(("begin", pool))
        self.shared = pool
        if self.broken_begin:
            raise RuntimeError("no beginning")

    def capture_end(self):
        self.log.append("end")
        if self.broken_end or self.broken_begin:
            raise RuntimeError("no end")
        self.has_ended = True

    def pool(self):
        if not self.has_ended:
            raise RuntimeError("no pool without a capture")
        return self.shared


@pytest.fixture
def log(monkeypatch):
    log = []
    monkeypatch.setattr(NotingGraph, "log", log, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NotingGraph)
    handles = iter("abc")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    return log


def test_call_is_made_within_the_capture(log):
    graph = CudaGraphCapturer().capture(lambda: log.append("call"))
    assert log == [("begin", "a"), "call", "end"]
    assert graph.has_ended


def test_graphs_share_a_pool_for_as_long_as_one_of_them_lives(log):
    graphs = CudaGraphCapturer()
    first = graphs.capture(lambda: None)
    second = graphs.capture(lambda: None)
    del first
    third = graphs.capture(lambda: None)
    del second, third
    gc.collect()
    # A pool that no graph has is gone, and torch refuses its handle.
    held = graphs.capture(lambda: None)
    assert [entry[1] for entry in log if entry != "end"] == ["a", "a", "a", "b"]
    assert held.has_ended


def fail():
    raise KeyError("of the call")


def test_capture_is_ended_when_its_call_fails_and_the_next_begins(log):
    graphs = CudaGraphCapturer()
    with pytest.raises(KeyError, match="of the call"):
        graphs.capture(fail)
    assert log == [("begin", "a"), "end"]
    assert graphs.capture(lambda: None).has_ended


@pytest.mark.parametrize("call", [fail, lambda: None])
@pytest.mark.parametrize("broken", ["broken_begin", "broken_end"])
def test_capture_that_cannot_be_ended_is_the_last(log, monkeypatch, broken, call):
    graphs = CudaGraphCapturer()
    monkeypatch.setattr(NotingGraph, broken, True)
    with pytest.raises((KeyError, RuntimeError), match=r"of the call|no beginning|no end"):
        graphs.capture(call)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="could not be ended"):
        graphs.capture(lambda: None)
