"""The choice of unfinished bodies that are aborted for a request that does not fit beside them."""

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeVar

from normserve.admission.tenants import Tenant, TenantShare
from normserve.errors import NormserveError

#: Why a body was aborted: it was too slow, or its tenant was above its share and the new request's tenant within.
STALLED, SHARE = REASONS = ("stalled", "share")


class RevocableBody(Protocol):
    """A request's body that is being received, and can be aborted to free its memory.

    Attributes:
        received_bytes: the number of received bytes.
        is_complete: whether the last byte has been received.
    """

    received_bytes: int
    is_complete: bool

    def abort(self, error: NormserveError) -> None:
        """Abort the body: its memory is freed at once, and the caller that waits for the body gets the error."""


class BodyRate:
    """The rate at which a body is received, measured only when another request needs its memory.

    Attributes:
        is_stalled: whether the body was slower than its due rate at the last measurement.
    """

    def __init__(self, body: RevocableBody, due_bytes_per_s: float, stall_s: float, now: float) -> None:
        """Args: stall_s: the shortest time over which a body's rate is judged."""
        self.body = body
        self.is_stalled = False
        self._min_bytes_per_s = due_bytes_per_s
        self._stall_s = stall_s
        self._measured_since = now
        self._received_bytes = body.received_bytes
        self._bytes_per_s: float | None = None

    def measure_relative_rate(self, now: float) -> float:
        """Measure the body's recent rate, and return it divided by its due rate: below 1, the body is too slow.

        In the first `stall_s` seconds, the received bytes are divided by `stall_s`.
        """
        received_bytes, span = self.body.received_bytes - self._received_bytes, now - self._measured_since
        if span >= self._stall_s:
            rate = self._bytes_per_s = received_bytes / span
            self._received_bytes, self._measured_since = self.body.received_bytes, now
        else:
            rate = max(self._bytes_per_s or 0.0, received_bytes / self._stall_s)
        self.is_stalled = self._bytes_per_s is not None and rate < self._min_bytes_per_s
        return rate / self._min_bytes_per_s


class RevocablePermit(Protocol):
    """A permit as `choose_permits_to_revoke` needs it: its tenant and its bytes."""

    tenant: Tenant
    nbytes: int


class CapacityShortfall(NamedTuple):
    """The requests and bytes that a new request needs beyond the free ones; 0 or less if enough are free."""

    request_count: int
    nbytes: int

    @property
    def is_covered(self) -> bool:
        return self.request_count <= 0 and self.nbytes <= 0

    def subtract_permit(self, held: RevocablePermit) -> "CapacityShortfall":
        """Return the shortfall that remains once a permit is revoked."""
        return CapacityShortfall(self.request_count - 1, self.nbytes - held.nbytes)

    def add_permit(self, held: RevocablePermit) -> "CapacityShortfall":
        """Return the shortfall if a permit that was chosen for revocation is kept."""
        return CapacityShortfall(self.request_count + 1, self.nbytes + held.nbytes)


_H = TypeVar("_H", bound=RevocablePermit)


def choose_permits_to_revoke(
    receiving: Iterable[tuple[_H, BodyRate]],
    shortfall: CapacityShortfall,
    share: TenantShare | None,
    now: float,
    *,
    measures_all: bool = True,
) -> list[tuple[_H, str]] | None:
    """Choose permits whose revocation covers the shortfall, each with the reason; return None if too few
    can be revoked.

    Stalled bodies are aborted first, then others of tenants above their share; each time the slowest
    first, and the largest of equally slow ones.

    Args:
        receiving: the permits whose body may be incomplete.
        share: each tenant's share, if permits of tenants above it may be revoked; else None.
        measures_all: whether to measure also bodies that were not stalled at their last measurement,
            which takes longer.
    """
    if shortfall.is_covered:
        return []
    chosen: list[tuple[_H, str]] = []
    remaining_use: dict[Tenant, tuple[int, int]] = {}
    for is_lively, _, _, held in _rank_candidates(receiving, shortfall, share, now, measures_all):
        if shortfall.is_covered:
            break
        requests, nbytes = remaining_use.get(held.tenant, (held.tenant.request_count, held.tenant.used_bytes))
        if is_lively and not _exceeds_share_of_short_resource(share, shortfall, requests, nbytes):
            continue
        chosen.append((held, SHARE if is_lively else STALLED))
        remaining_use[held.tenant] = requests - 1, nbytes - held.nbytes
        shortfall = shortfall.subtract_permit(held)
    return _drop_unneeded(chosen, shortfall) if shortfall.is_covered else None


def _rank_candidates(
    receiving: Iterable[tuple[_H, BodyRate]],
    lacking: CapacityShortfall,
    share: TenantShare | None,
    now: float,
    looks_at_all: bool,
) -> list[tuple[bool, float, int, _H]]:
    """List the permits that may be revoked, in the order of revocation.  Each tuple has the sort keys and then the
    permit.

    The keys are whether the body is not stalled, its relative rate, and the negative bytes of the
    permit. Unless `looks_at_all`, the list is empty if all candidates together cannot cover the
    shortfall.
    """
    possible = [
        (held, inflow)
        for held, inflow in receiving
        if (looks_at_all or inflow.is_stalled or _is_above_share(held.tenant, share))
        and not inflow.body.is_complete
    ]
    is_too_little = (
        len(possible) < lacking.request_count or sum(held.nbytes for held, _ in possible) < lacking.nbytes
    )
    if is_too_little and not looks_at_all:
        return []
    candidates = []
    for held, inflow in possible:
        pace = inflow.measure_relative_rate(now)
        if inflow.is_stalled or _is_above_share(held.tenant, share):
            candidates.append((not inflow.is_stalled, pace, -held.nbytes, held))
    return sorted(candidates, key=itemgetter(0, 1, 2))


def _is_above_share(tenant: Tenant, share: TenantShare | None) -> bool:
    """Return whether a tenant has more than its share of requests or of bytes."""
    return share is not None and (tenant.request_count > share.max_requests or tenant.used_bytes > share.max_bytes)


def _exceeds_share_of_short_resource(
    share: TenantShare | None, lacking: CapacityShortfall, requests: int, nbytes: int
) -> bool:
    """Return whether a tenant with `requests` and `nbytes` exceeds its share of a resource that is short.

    The resources are requests and bytes; a tenant is spared if it has too much only of one that is not
    short.
    """
    return share is not None and not share.is_enough_for(
        requests if lacking.request_count > 0 else 0, nbytes if lacking.nbytes > 0 else 0
    )


def _drop_unneeded(chosen: list[tuple[_H, str]], lacking: CapacityShortfall) -> list[tuple[_H, str]]:
    """Return the chosen permits without those whose revocation the shortfall does not need.

    A permit may be unneeded because a larger one was chosen after it.

    Args: lacking: the shortfall that remains if all chosen permits are revoked, at most 0.
    """
    needed = []
    for held, reason in chosen:
        if lacking.add_permit(held).is_covered:
            lacking = lacking.add_permit(held)
        else:
            needed.append((held, reason))
    return needed
