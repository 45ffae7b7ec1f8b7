"""How the time of a batch is divided among its stages."""

import pytest
from normserve.backends.cuda.pipeline import PartEvents, PendingCudaLaunch

from tests.service.backends.cuda.test_pipeline import FakeDevice, FakeEvent


def seconds_of(parts, *, leaving=None, ended):
    """Of a batch that begins at 0, with moments in seconds."""
    device = FakeDevice()

    def at(moment):
        return FakeEvent(device, moment)

    marks = []
    for arrived, started, computed in parts:
        arriving = at(arrived)
        marks.append(PartEvents(arriving, arriving if started is None else at(started), at(computed)))
    last = None if leaving is None else at(leaving)
    return tuple(PendingCudaLaunch(at(0), marks, last, at(ended), held=None, events=(), spare=[]).measure_stages())


@pytest.mark.parametrize(
    ("parts", "leaving", "ended", "seconds"),
    [
        ([], None, 3, (0, 3, 0)),
        ([(1, None, 3)], None, 7, (1, 2, 4)),
        ([(1, 5, 7)], 9, 10, (1, 2, 1)),
        ([(1, None, 5), (2, None, 7)], None, 8, (1, 6, 1)),
        ([(1, None, 2), (4, None, 7)], None, 8, (3, 4, 1)),
    ],
    ids=["nothing is copied", "whole", "behind others", "copies are sooner", "computing is sooner"],
)
def test_stages(parts, leaving, ended, seconds):
    assert seconds_of(parts, leaving=leaving, ended=ended) == seconds
