"""The model of an operation's memory, held against what the CPU backend takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fusednorm.cpu.batch_invariant.row_norms import WHOLE_ELEMENTS
from fusednorm.cpu.chunks import PIECE_ELEMENTS
from normserve.jobs import memory_cost as model
from normserve.jobs.job import ChannelLayout, NormSpec, Op, PassDirection
from normserve.jobs.memory_cost import SCRATCH_BYTES, estimate_memory_cost
from normserve.jobs.validation import make_validated_job
from normserve.memory.tensors import DType

from tests.service.jobs.fake_jobs import layer, tensor

MIB = 2**20
FORWARD = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak since a moment")
def test_model_holds_against_measured_peaks():
    program = [sys.executable, "-m", "tests.service.jobs.peak_memory"]
    root = Path(__file__).parents[3]
    run = subprocess.run(program, cwd=root, capture_output=True, text=True, check=True, timeout=300)
    measured = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(measured) == 2 * (12 + 12 + 12) + 14 + 20
    for case in measured:
        assert case["results"][0] == case["results"][1], case
        # Of tensors as small as these malloc keeps no more than half of what is granted.
        assert case["peak"] <= case["model"] + SCRATCH_BYTES // 2, case
        # Neither does it refuse what would fit.
        assert case["model"] <= 1.5 * case["peak"] + 8 * MIB, case
    # There is something to be wrong about.
    assert max(case["peak"] for case in measured) > SCRATCH_BYTES // 2 + 16 * MIB


def test_sizes_are_those_of_the_library():
    assert (model.PIECE_ELEMENTS, model.REUSED_ELEMENTS) == (PIECE_ELEMENTS, WHOLE_ELEMENTS)


def described(**shapes):
    return {name: (dtype, shape) for name, (dtype, shape) in shapes.items()}


class TestResults:
    def test_rows_of_one_element_come_back_many_times_as_large(self):
        spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, out_dtype=DType.FLOAT32, stats=True)
        x = (DType.FLOAT16, (MIB, 1))
        cost = estimate_memory_cost(spec, described(x=x), None)
        assert cost == (12 * MIB, 0, 0)
        cost = estimate_memory_cost(spec, described(x=x, residual=x), None)
        assert cost.result_bytes == 14 * MIB

    def test_only_a_large_y_of_xs_size_is_written_over_x(self):
        x = (DType.FLOAT32, (1024, 1024))
        cost = estimate_memory_cost(FORWARD, described(x=x), None)
        assert (cost.result_bytes, cost.reusable_bytes) == (4 * MIB, 4 * MIB)
        assert (cost.count_cpu_bytes(may_overwrite=True), cost.count_cpu_bytes(may_overwrite=False)) == (0, 4 * MIB)
        small = (DType.FLOAT32, (256, 1024))
        assert estimate_memory_cost(FORWARD, described(x=small), None).reusable_bytes == 0
        backward = NormSpec(Op.LAYER_NORM, PassDirection.BACKWARD, 1e-5)
        assert estimate_memory_cost(backward, described(x=x, dy=x), None).reusable_bytes == 0

    def test_gradients_of_a_registered_layer_are_counted(self):
        spec = NormSpec(Op.RMS_NORM, PassDirection.BACKWARD, 1e-5)
        x = (DType.FLOAT16, (3, 64))
        registered = layer(op=Op.RMS_NORM, size=64, has_bias=False)
        assert estimate_memory_cost(spec, described(x=x, dy=x), registered).result_bytes == 2 * 3 * 64 + 4 * 64


class TestTemporaries:
    def test_short_rows_and_small_groups_need_none_that_grow(self):
        x = (DType.FLOAT16, (2**30, 1))
        assert estimate_memory_cost(FORWARD, described(x=x), None).temporary_bytes == 0
        spec = NormSpec(Op.GROUP_NORM, PassDirection.FORWARD, 1e-5, 4, ChannelLayout.NHWC)
        x = (DType.FLOAT16, (2**20, 8, 8))
        assert estimate_memory_cost(spec, described(x=x), None).temporary_bytes == 0

    def test_a_long_row_needs_its_float32_copies(self):
        x = (DType.FLOAT16, (1, 2**30))
        assert estimate_memory_cost(FORWARD, described(x=x), None).temporary_bytes == 8 * 2**30

    def test_long_channels_are_copied_to_be_a_row(self):
        spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, layout=ChannelLayout.NCHW)
        x = (DType.FLOAT32, (1, 2**28, 4))
        assert estimate_memory_cost(spec, described(x=x), None).temporary_bytes == 8 * 2**28
        assert estimate_memory_cost(spec, described(x=x, residual=x), None).temporary_bytes == 12 * 2**28
        x = (DType.FLOAT32, (1, 4, 2**28))
        assert estimate_memory_cost(spec, described(x=x), None).temporary_bytes == 0

    def test_no_rows_need_nothing(self):
        for op, shape in ((Op.LAYER_NORM, (0, 2**40)), (Op.GROUP_NORM, (0, 2**20, 2**20))):
            spec = NormSpec(op, PassDirection.BACKWARD, 1e-5, num_groups=4)
            x = (DType.FLOAT16, shape)
            assert estimate_memory_cost(spec, described(x=x, dy=x), None) == (0, 0, 0)

    def test_sizes_do_not_wrap(self):
        x = (DType.FLOAT32, (2**40, 2**40))
        cost = estimate_memory_cost(FORWARD, described(x=x), None)
        assert cost.result_bytes == 4 * 2**80
        assert cost.temporary_bytes > 2**40


def test_cost_comes_with_the_checked_job():
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, stats=True)
    job, cost = make_validated_job(spec, {"x": tensor(3, 4)})
    assert job.spec is spec
    assert cost.result_bytes == 48 + 24
