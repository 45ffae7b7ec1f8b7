"""Charges for the memory of a request's computation, before the computation begins."""

from dataclasses import dataclass

from normserve.admission.permits import Permit
from normserve.engine.engine import Engine
from normserve.errors import TooLargeError
from normserve.jobs.job import NormJob
from normserve.jobs.memory_cost import MemoryCost

UNCHARGED_BYTES = 64 * 1024
"""Limit of results and temporaries that are not charged, since the number of requests bounds them."""


@dataclass(frozen=True, slots=True)
class MemoryAdmission:
    """An object that charges a received request's results, temporaries and body copies to the request's permit.

    Attributes:
        max_bytes: limit of bodies, results and temporaries of all requests in progress.
    """

    engine: Engine
    max_bytes: int

    def charge_results_and_temporaries(
        self, permit: Permit | None, job: NormJob, cost: MemoryCost, body_bytes: int
    ) -> None:
        """Add the bytes of the job's results and temporaries to the request's permit, unless they are few
        (`UNCHARGED_BYTES`).  On a GPU only results count.

        Raises:
            TooLargeError: the request needs more than `max_bytes`; the message has the bytes that it needs.
            OverloadedError: the budget has too few free bytes now.
        """
        if cost.result_bytes + cost.temporary_bytes <= UNCHARGED_BYTES:
            return
        if job.x.fortran_order:
            # The tensor is transposed into a separate buffer.
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

    def charge_body_copy(self, permit: Permit | None, body_bytes: int) -> None:
        """Add the bytes of a copy of the request's body to the request's permit.

        Raises:
            TooLargeError: the body and its copy need more than `max_bytes`.
            OverloadedError: the budget has too few free bytes now.
        """
        if 2 * body_bytes > self.max_bytes:
            raise TooLargeError(
                f"this request takes {2 * body_bytes} bytes of memory, its body and a copy; "
                f"at most {self.max_bytes} are allowed"
            )
        if permit is not None:
            permit.grow(body_bytes)
