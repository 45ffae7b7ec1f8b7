"""Charges a request for the memory of its computation before it is computed, or refuses it."""

from dataclasses import dataclass

from normserve.admission.permits import Permit
from normserve.engine.engine import Engine
from normserve.errors import TooLargeError
from normserve.jobs.job import NormJob
from normserve.jobs.memory_cost import MemoryCost

UNCHARGED_BYTES = 64 * 1024
"""Results and temporaries of so many bytes are bounded by the number of requests."""


@dataclass(frozen=True, slots=True)
class MemoryAdmission:
    """Charges requests whose bodies have been admitted and received.

    Attributes:
        max_bytes: inside at once: of bodies, results and temporaries.
    """

    engine: Engine
    max_bytes: int

    def charge_job(self, permit: Permit | None, job: NormJob, cost: MemoryCost, body_bytes: int) -> None:
        """Have the request's permit cover its results and temporaries, too, unless they are few.

        Raises:
            TooLargeError: it never will; it says what the request takes.
            OverloadedError: not now.
        """
        if cost.result_bytes + cost.temporary_bytes <= UNCHARGED_BYTES:
            return
        if job.x.fortran_order:
            # Turned round in memory of its own.
            cost = cost._replace(temporary_bytes=cost.temporary_bytes + job.x.nbytes)
        device = self.engine.device_description
        if device is not None and device.kind == "cpu":
            nbytes = cost.count_cpu_bytes(may_overwrite=job.may_overwrite)
        else:
            nbytes = cost.result_bytes
        if body_bytes + nbytes > self.max_bytes:
            raise TooLargeError(
                f"this request takes {body_bytes + nbytes} bytes of memory, {body_bytes} of its body and {nbytes} "
                f"of results and temporaries; at most {self.max_bytes} are allowed"
            )
        if permit is not None:
            permit.grow(nbytes)

    def charge_copy(self, permit: Permit | None, body_bytes: int) -> None:
        """Have the request's permit cover a copy of its body, too.

        Raises:
            TooLargeError: it never will.
            OverloadedError: not now.
        """
        if 2 * body_bytes > self.max_bytes:
            raise TooLargeError(
                f"this request takes {2 * body_bytes} bytes of memory, its body and a copy; "
                f"at most {self.max_bytes} are allowed"
            )
        if permit is not None:
            permit.grow(body_bytes)
