"""How many classes are compiled, how fast, and who waits."""

import pytest
from normserve.engine.compilation_queue import CompilationQueue
from normserve.errors import OverloadedError
from normserve.jobs.job import Op, PassDirection
from normserve.memory.tensors import DType

from tests.service.jobs.fake_jobs import job, layer, tensor


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def compilation(clock):
    return CompilationQueue(max_classes=100, max_per_minute=2, clock=clock)


def test_first_of_a_class_asks_for_it_and_the_rest_wait(compilation):
    jobs = [job(1, 4), job(2, 4)]
    assert compilation.add_waiting_job("a", jobs[0])
    assert not compilation.add_waiting_job("a", jobs[1])
    assert "a" not in compilation
    assert list(compilation.end_compilation_and_take_jobs("a", has_succeeded=True)) == jobs
    assert "a" in compilation
    assert len(compilation) == 0


def test_class_that_failed_is_asked_for_again(compilation):
    compilation.add_waiting_job("a", job(1, 4))
    compilation.end_compilation_and_take_jobs("a", has_succeeded=False)
    assert compilation.add_waiting_job("a", job(1, 4))


def test_discarded_job_waits_no_more(compilation):
    stays, goes = job(1, 4), job(1, 4)
    for each in (stays, goes):
        compilation.add_waiting_job("a", each)
    compilation.discard_job(goes)
    compilation.discard_job(goes)
    assert list(compilation.list_jobs()) == [stays]
    assert list(compilation.end_compilation_and_take_jobs("a", has_succeeded=True)) == [stays]


def test_rate_is_bounded_and_says_when_to_come_back(compilation, clock):
    compilation.add_waiting_job("a", job(1, 4))
    compilation.add_waiting_job("b", job(1, 4))
    with pytest.raises(OverloadedError) as refused:
        compilation.add_waiting_job("c", job(1, 4))
    assert refused.value.retry_after_s == pytest.approx(30)
    # Those who wait for a class that is under way cost nothing.
    compilation.add_waiting_job("a", job(1, 4))
    clock.now += refused.value.retry_after_s
    assert compilation.add_waiting_job("c", job(1, 4))


def test_number_is_bounded(clock):
    compilation = CompilationQueue(max_classes=3, max_per_minute=1000, clock=clock)
    compilation.add_compiled(["a", "b"])
    compilation.add_waiting_job("c", job(1, 4))
    with pytest.raises(OverloadedError):
        compilation.add_waiting_job("d", job(1, 4))


SAME = {
    "rows": (job(1, 4), job(9, 4)),
    "rank": (job(1, 4), job(2, 3, 4)),
    "eps": (job(1, 4), job(1, 4, eps=1e-3)),
    "seed": (job(1, 4, dropout=0.5, seed=1), job(1, 4, dropout=0.25, seed=2)),
    "layer": (job(1, 4, layer=layer("a")), job(1, 4, layer=layer("b"))),
    "samples": (job(1, 4, 6, op=Op.GROUP_NORM, num_groups=2), job(3, 4, 6, op=Op.GROUP_NORM, num_groups=2)),
}
OTHER = {
    "cols": job(1, 5),
    "dtype": job(1, 4, tensors={"x": tensor(1, 4, dtype=DType.FLOAT16)}),
    "residual": job(1, 4, tensors={"residual": tensor(1, 4)}),
    "weight": job(1, 4, tensors={"weight": tensor(4)}),
    "weight's dtype": job(1, 4, tensors={"weight": tensor(4, dtype=DType.BFLOAT16)}),
    "layer": job(1, 4, layer=layer()),
    "layer without bias": job(1, 4, layer=layer(has_bias=False)),
    "activation": job(1, 4, activation="silu"),
    "dropout": job(1, 4, dropout=0.5, seed=1),
    "stats": job(1, 4, stats=True),
    "out_dtype": job(1, 4, out_dtype=DType.BFLOAT16),
    "direction": job(1, 4, direction=PassDirection.BACKWARD, tensors={"dy": tensor(1, 4)}),
    "op": job(1, 4, op=Op.RMS_NORM),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_same_kernels(pair):
    assert pair[0].compute_kernel_class() == pair[1].compute_kernel_class()


def test_other_kernels():
    kinds = [each.compute_kernel_class() for each in (job(1, 4), *OTHER.values())]
    assert len(set(kinds)) == len(kinds)
