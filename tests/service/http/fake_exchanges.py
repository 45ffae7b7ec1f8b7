"""As much of a request over HTTP as its body takes."""

from types import SimpleNamespace
from typing import Any

from normserve.admission.callers import Caller
from normserve.admission.permits import Limits, Permit


def make_exchange(limits: Limits, reception: Any, address: str = "127.0.0.1") -> Any:
    """Return a request with a body to be received; `permit` is None until it has one."""
    caller = Caller(address)
    exchange = SimpleNamespace(reception=reception, permit=None)

    def acquire_permit(nbytes: int) -> Permit:
        exchange.permit = limits.acquire(nbytes, caller.tenant, caller.max_inflight_bytes)
        return exchange.permit

    exchange.acquire_permit = acquire_permit
    return exchange
