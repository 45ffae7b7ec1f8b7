from dataclasses import replace

import fusednorm
import pytest
import torch
from fusednorm.launch import replay_cache

from benchmarks.harness.oracle import ResultOracle
from benchmarks.host.calls import PROVIDERS, MissingExtensionError, make_call, select_settings
from benchmarks.host.cells import CELLS, FORWARD_BACKWARD
from benchmarks.workload.problems import EPS, BenchmarkProblem, ProviderRun, TensorCache

NEEDS_GPU = {("torch", "rms_norm", "backward")}
"""torch has no operator for it elsewhere."""


def shortened(cell, device):
    """What the interpreter does in moments; the cell itself on a GPU."""
    if device == "cuda":
        return cell
    return replace(cell, shape=(2, 8, 3, 5) if cell.groups else (6, 64), groups=4 if cell.groups else 0)


@pytest.mark.parametrize("provider", ["torch", "fusednorm_python"])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_what_is_timed_is_right_the_second_time_too(cell, provider, device):
    if (provider, cell.op, cell.pass_) in NEEDS_GPU and device == "cpu":
        pytest.skip("torch has this operator on GPUs only")
    tensors, small = TensorCache(device), shortened(cell, device)
    exact = ResultOracle(BenchmarkProblem(replace(small, pass_=small.pass_.removeprefix("forward_")), tensors))
    made = make_call(provider, BenchmarkProblem(small, tensors))
    for _ in range(2):
        assert (
            exact.measure_error(ProviderRun(lambda: tuple(t.detach() for t in made.select_results(made.call()))))
            < 0.1
        )


def test_liger_is_left_out_of_groups_that_lie_channels_last(problem):
    of = {"op": "group_norm", "shape": (2, 8, 3, 5), "groups": 4, "layout": "nhwc"}
    assert make_call("liger", problem(**of)) is None
    assert make_call("liger", problem(**of | {"pass_": FORWARD_BACKWARD, "variant": "silu"})) is None


def test_the_extension_is_put_aside_and_put_back(monkeypatch):
    monkeypatch.setattr(replay_cache, "_load", None)
    extension = type("Extension", (), {"define_pass": lambda self, *follows: 0})()
    for each in replay_cache._PASSES:
        monkeypatch.setattr(each, "extension_number", each.extension_number)
    monkeypatch.setattr(replay_cache, "_extension", extension)
    with select_settings("fusednorm_python"):
        assert replay_cache.get_extension() is None
    assert replay_cache.get_extension() is extension
    with select_settings("fusednorm"):
        assert replay_cache.get_extension() is extension


def test_without_replays_no_call_is_looked_up(monkeypatch, device):
    looked_up = []
    monkeypatch.setattr(replay_cache.ReplayablePass, "_find_replay", lambda *call: looked_up.append(call))
    x = torch.randn(6, 64, device=device)
    with select_settings("fusednorm_planned"):
        fusednorm.layer_norm_forward(x, eps=EPS)
    assert not looked_up
    fusednorm.layer_norm_forward(x, eps=EPS)
    assert looked_up


@pytest.mark.skipif(torch.cuda.is_available(), reason="the extension may be there")
def test_without_the_extension_nothing_is_timed_in_its_name():
    with pytest.raises(MissingExtensionError, match=r"python -m fusednorm.host"), select_settings("fusednorm"):
        pytest.fail("entered")


def test_torch_is_timed_first():
    assert PROVIDERS[0] == "torch"
