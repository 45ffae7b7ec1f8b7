"""Results and temporaries are charged before the work, by where it is done."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from normserve.errors import OverloadedError, TooLargeError
from normserve.jobs.job import NormSpec, Op, PassDirection
from normserve.jobs.validation import make_validated_job
from normserve.requests.memory_admission import UNCHARGED_BYTES, MemoryAdmission

from tests.service.jobs.fake_jobs import tensor

MIB = 2**20
SPEC = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)


class FakePermit:
    """Grants so many bytes."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.taken = 0

    def grow(self, nbytes: int) -> None:
        if self.taken + nbytes > self.free:
            raise OverloadedError("not now")
        self.taken += nbytes


def charged(
    shape, spec=SPEC, *, kind="cpu", free=2**40, max_bytes=2**40, may_overwrite=True, fortran=False, body=0
):
    admission = MemoryAdmission(SimpleNamespace(device_description=SimpleNamespace(kind=kind)), max_bytes)
    x = replace(tensor(*shape), fortran_order=fortran)
    job, cost = make_validated_job(spec, {"x": x}, may_overwrite=may_overwrite)
    permit = FakePermit(free)
    admission.charge_results_and_temporaries(permit, job, cost, body)
    return permit.taken


def test_on_the_cpu_a_large_y_lies_where_x_came_in():
    assert charged((512, 1024)) == 0
    assert charged((512, 1024), may_overwrite=False) == 2 * MIB


def test_beside_a_gpu_results_are_all_that_is_taken():
    assert charged((1, MIB), kind="cuda") == 4 * MIB
    # On a CPU a row so long is computed in memory of its own.
    assert charged((1, MIB)) == 4 * MIB
    assert charged((1, MIB), may_overwrite=False) == 8 * MIB


def test_column_major_order_takes_a_copy():
    assert charged((512, 1024), fortran=True) == 2 * MIB


def test_little_is_not_charged():
    count = UNCHARGED_BYTES // 4
    assert charged((1, count), may_overwrite=False, free=0) == 0
    assert charged((1, count + 1), may_overwrite=False) == UNCHARGED_BYTES + 4


def test_what_never_fits_is_told_apart_from_what_does_not_fit_now():
    with pytest.raises(OverloadedError):
        charged((512, 1024), may_overwrite=False, free=2 * MIB - 1)
    assert charged((512, 1024), may_overwrite=False, max_bytes=3 * MIB, body=MIB) == 2 * MIB
    with pytest.raises(TooLargeError, match=f"takes {3 * MIB + 1} bytes .* {MIB + 1} of its body and {2 * MIB} of"):
        charged((512, 1024), may_overwrite=False, max_bytes=3 * MIB, body=MIB + 1)


def test_a_body_and_its_copy():
    admission = MemoryAdmission(SimpleNamespace(device_description=None), 100)
    permit = FakePermit(100)
    admission.charge_body_copy(permit, 50)
    assert permit.taken == 50
    with pytest.raises(TooLargeError, match="takes 102 bytes"):
        admission.charge_body_copy(permit, 51)
