import io
import json
from dataclasses import asdict

import pytest
import torch

from benchmarks.cpu_version_pairs import (
    OPTIONS,
    CpuCallCell,
    iterate_cells,
    make_call,
    measure_cell,
    run_requested_turns,
)

SMALL = [cell for cell in iterate_cells() if cell.nbytes == 4096 and cell.dtype == "float32"]


class Turns:
    """A version whose calls take the given seconds, one after another."""

    def __init__(self, *seconds):
        self._seconds = iter(seconds)

    def time_turn(self, cell):
        return next(self._seconds)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.full_name)
def test_each_call_can_be_repeated(cell):
    call = make_call(cell)
    first, second = call(), call()
    for one, other in zip(
        first if isinstance(first, tuple) else [first],
        second if isinstance(second, tuple) else [second],
        strict=True,
    ):
        assert torch.equal(one, other)
        assert one.isfinite().all()


def test_every_option_has_a_cell():
    assert {cell.option for cell in SMALL} == set(OPTIONS)


def test_a_request_of_a_turn_has_one_time():
    cell = SMALL[0]
    times = io.StringIO()
    run_requested_turns(io.StringIO(2 * (json.dumps(asdict(cell)) + "\n")), times)
    assert len([float(line) for line in times.getvalue().splitlines()]) == 2


def test_a_speed_above_one_is_a_gain():
    cell = CpuCallCell("layer_norm", "forward", "plain", "float32", 4096)
    row = measure_cell(Turns(9, 4e-6, 6e-6, 4e-6), Turns(9, 2e-6, 2e-6, 2e-6), cell, 3)
    assert (row["before_us"], row["after_us"], row["speed"], row["low"], row["high"]) == (
        "4.0",
        "2.0",
        "2.00",
        "2.00",
        "3.00",
    )
