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
        received: bytes that have come.
        is_complete: its last byte has come.
    """

    received: int
    is_complete: bool

    def fail(self, error: NormserveError) -> None:
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
        self._due = due_bytes_per_s
        self._stall_s = stall_s
        self._since = now
        self._received = body.received
        self._rate: float | None = None

    def pace(self, now: float) -> float:
        """Its rate of late over the one that is due; that of a body which has just begun as if it had for long."""
        came, span = self.body.received - self._received, now - self._since
        if span >= self._stall_s:
            rate = self._rate = came / span
            self._received, self._since = self.body.received, now
        else:
            rate = max(self._rate or 0.0, came / self._stall_s)
        self.is_stalled = self._rate is not None and rate < self._due
        return rate / self._due


class RevocablePermit(Protocol):
    """A permit, as far as it matters here."""

    tenant: Tenant
    nbytes: int


class CapacityShortfall(NamedTuple):
    """What the newcomer needs beyond what is free; 0 or less of what there is enough of."""

    requests: int
    bytes: int

    @property
    def is_nothing(self) -> bool:
        return self.requests <= 0 and self.bytes <= 0

    def less(self, held: RevocablePermit) -> "CapacityShortfall":
        """What still lacks once a permit is revoked."""
        return CapacityShortfall(self.requests - 1, self.bytes - held.nbytes)

    def more(self, held: RevocablePermit) -> "CapacityShortfall":
        """What lacks if a permit is not revoked after all."""
        return CapacityShortfall(self.requests + 1, self.bytes + held.nbytes)


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
    if lacking.is_nothing:
        return []
    chosen: list[tuple[_H, str]] = []
    left: dict[Tenant, tuple[int, int]] = {}
    for is_lively, _, _, held in _rank_candidates(receiving, lacking, share, now, looks_at_all):
        if lacking.is_nothing:
            break
        requests, nbytes = left.get(held.tenant, (held.tenant.requests, held.tenant.bytes))
        if is_lively and not _is_above_share_of_shortfall(share, lacking, requests, nbytes):
            continue
        chosen.append((held, SHARE if is_lively else STALLED))
        left[held.tenant] = requests - 1, nbytes - held.nbytes
        lacking = lacking.less(held)
    return _drop_unneeded(chosen, lacking) if lacking.is_nothing else None


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
    is_too_little = len(possible) < lacking.requests or sum(held.nbytes for held, _ in possible) < lacking.bytes
    if is_too_little and not looks_at_all:
        return []
    candidates = []
    for held, inflow in possible:
        pace = inflow.pace(now)
        if inflow.is_stalled or _is_above_share(held.tenant, share):
            candidates.append((not inflow.is_stalled, pace, -held.nbytes, held))
    return sorted(candidates, key=itemgetter(0, 1, 2))


def _is_above_share(tenant: Tenant, share: TenantShare | None) -> bool:
    """Whether a tenant has more than its share of anything."""
    return share is not None and (tenant.requests > share.requests or tenant.bytes > share.bytes)


def _is_above_share_of_shortfall(
    share: TenantShare | None, lacking: CapacityShortfall, requests: int, nbytes: int
) -> bool:
    """Whether a tenant has more than its share of what lacks."""
    return share is not None and not share.allows(
        requests if lacking.requests > 0 else 0, nbytes if lacking.bytes > 0 else 0
    )


def _drop_unneeded(chosen: list[tuple[_H, str]], lacking: CapacityShortfall) -> list[tuple[_H, str]]:
    """Without those that help nothing, or that a larger one, chosen after them, has made superfluous."""
    kept = []
    for held, reason in chosen:
        if lacking.more(held).is_nothing:
            lacking = lacking.more(held)
        else:
            kept.append((held, reason))
    return kept
