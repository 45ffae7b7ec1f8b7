"""The choice of unfinished bodies that are aborted for a request that does not fit beside them."""

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeVar

from normserve.admission.tenants import Tenant, TenantShare
from normserve.errors import NormserveError

#: Why a body gave way: it came too slowly, or its tenant had more than its share and the newcomer's less.
STALLED, SHARE = REASONS = ("stalled", "share")


class RevocableBody(Protocol):
    """A request's body as it is received.

    Attributes:
        received_bytes: bytes that have come.
        is_complete: its last byte has come.
    """

    received_bytes: int
    is_complete: bool

    def abort(self, error: NormserveError) -> None:
        """End it: its memory is freed at once, and the caller that waits for it gets the error."""


class BodyRate:
    """How fast a body comes.  It is looked at only where others want its place, and costs nothing before.

    Attributes:
        is_stalled: it came more slowly than it was due, when it was last looked at.
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
        """Its rate of late over the one that is due; that of a body which has just begun as if it had for long."""
        came, span = self.body.received_bytes - self._received_bytes, now - self._measured_since
        if span >= self._stall_s:
            rate = self._bytes_per_s = came / span
            self._received_bytes, self._measured_since = self.body.received_bytes, now
        else:
            rate = max(self._bytes_per_s or 0.0, came / self._stall_s)
        self.is_stalled = self._bytes_per_s is not None and rate < self._min_bytes_per_s
        return rate / self._min_bytes_per_s


class RevocablePermit(Protocol):
    """A permit, as far as it matters here."""

    tenant: Tenant
    nbytes: int


class CapacityShortfall(NamedTuple):
    """What the newcomer needs beyond what is free; 0 or less of what there is enough of."""

    request_count: int
    nbytes: int

    @property
    def is_covered(self) -> bool:
        return self.request_count <= 0 and self.nbytes <= 0

    def subtract_permit(self, held: RevocablePermit) -> "CapacityShortfall":
        """What still lacks once a permit is revoked."""
        return CapacityShortfall(self.request_count - 1, self.nbytes - held.nbytes)

    def add_permit(self, held: RevocablePermit) -> "CapacityShortfall":
        """What lacks if a permit is not revoked after all."""
        return CapacityShortfall(self.request_count + 1, self.nbytes + held.nbytes)


_H = TypeVar("_H", bound=RevocablePermit)


def choose_permits_to_revoke(
    receiving: Iterable[tuple[_H, BodyRate]],
    lacking: CapacityShortfall,
    share: TenantShare | None,
    now: float,
    *,
    looks_at_all: bool = True,
) -> list[tuple[_H, str]] | None:
    """The permits to revoke and why; None where all that could be are too few.

    Stalled ones come first, then the others of tenants above their share; among them the slowest, the largest of
    equally slow ones.

    Args:
        receiving: those whose body is not known to be whole.
        share: each tenant's, if the newcomer may take from those that hold more.
        looks_at_all: also at bodies that did not stall when they were last looked at, which takes its time.
    """
    if lacking.is_covered:
        return []
    chosen: list[tuple[_H, str]] = []
    left: dict[Tenant, tuple[int, int]] = {}
    for is_lively, _, _, held in _rank_candidates(receiving, lacking, share, now, looks_at_all):
        if lacking.is_covered:
            break
        requests, nbytes = left.get(held.tenant, (held.tenant.request_count, held.tenant.used_bytes))
        if is_lively and not _is_above_share_of_shortfall(share, lacking, requests, nbytes):
            continue
        chosen.append((held, SHARE if is_lively else STALLED))
        left[held.tenant] = requests - 1, nbytes - held.nbytes
        lacking = lacking.subtract_permit(held)
    return _drop_unneeded(chosen, lacking) if lacking.is_covered else None


def _rank_candidates(
    receiving: Iterable[tuple[_H, BodyRate]],
    lacking: CapacityShortfall,
    share: TenantShare | None,
    now: float,
    looks_at_all: bool,
) -> list[tuple[bool, float, int, _H]]:
    """Those that may give way in the order in which they do, each behind what that order is by; none if too few."""
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
    """Whether a tenant has more than its share of anything."""
    return share is not None and (tenant.request_count > share.max_requests or tenant.used_bytes > share.max_bytes)


def _is_above_share_of_shortfall(
    share: TenantShare | None, lacking: CapacityShortfall, requests: int, nbytes: int
) -> bool:
    """Whether a tenant has more than its share of what lacks."""
    return share is not None and not share.is_enough_for(
        requests if lacking.request_count > 0 else 0, nbytes if lacking.nbytes > 0 else 0
    )


def _drop_unneeded(chosen: list[tuple[_H, str]], lacking: CapacityShortfall) -> list[tuple[_H, str]]:
    """Without those that help nothing, or that a larger one, chosen after them, has made superfluous."""
    kept = []
    for held, reason in chosen:
        if lacking.add_permit(held).is_covered:
            lacking = lacking.add_permit(held)
        else:
            kept.append((held, reason))
    return kept
