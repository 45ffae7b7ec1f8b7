"""The division of the budget of requests and bytes between tenants."""

from typing import NamedTuple

# How long a tenant that was refused counts among those that share.
_CLAIM_S = 2.0
# Refusals that are remembered: an attacker may have many addresses.
_MAX_CLAIMS = 1024
# Tenants that hold nothing and are kept for their next request, besides twice as many as the others.
_MAX_IDLE = 1024


class Tenant:
    """One of those that share.

    Attributes:
        requests, bytes: what it holds.
        refused_at: when it was last refused, while that counts.
        is_owed: it was refused although it had less than its share.
    """

    __slots__ = ("bytes", "is_owed", "name", "refused_at", "requests")

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests = 0
        self.bytes = 0
        self.refused_at: float | None = None
        self.is_owed = False

    @property
    def is_sharing(self) -> bool:
        """It holds something, or wanted to of late."""
        return self.requests > 0 or self.refused_at is not None


class TenantShare(NamedTuple):
    """What each tenant may hold while others want it, too; one request in any case."""

    requests: float
    bytes: float

    def allows(self, requests: int, nbytes: int) -> bool:
        """Whether a tenant that holds so much is within its share."""
        return requests <= self.requests and nbytes <= self.bytes


class TenantTable:
    """Those that hold something or were refused of late; each one's share is the budget over their number.

    Some that neither hold anything nor were refused are kept, so that a client's next request finds its tenant.
    How many are remembered is bounded by the admitted requests and two constants.

    Attributes:
        by_name: all that are remembered.
        count: those among whom the budget is shared.
        owed: how many of these were refused although they had less than their share.
    """

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._refused: dict[str, Tenant] = {}  # in the order of their last refusal
        self._prune_at = _MAX_IDLE
        self.by_name: dict[str, Tenant] = {}
        self.count = 0
        self.owed = 0

    def add(self, name: str) -> Tenant:
        """One that is not known."""
        if len(self.by_name) >= self._prune_at:
            for idle in [tenant.name for tenant in self.by_name.values() if not tenant.is_sharing]:
                del self.by_name[idle]
            # Few enough calls of this, however many remain.
            self._prune_at = _MAX_IDLE + 2 * len(self.by_name)
        tenant = self.by_name[name] = Tenant(name)
        return tenant

    def share_with(self, newcomer: Tenant) -> TenantShare:
        """What is each one's, a newcomer's as well."""
        count = self.count + (not newcomer.is_sharing)
        return TenantShare(max(1.0, self._max_requests / count), self._max_bytes / count)

    def others_are_owed(self, tenant: Tenant) -> bool:
        """Whether another tenant was refused of late although it had less than its share."""
        return self.owed > tenant.is_owed

    def refuse(self, tenant: Tenant, now: float, *, is_owed: bool) -> None:
        """Remember that a tenant was refused, and whether it had less than its share."""
        if tenant.is_owed and not is_owed:
            return
        self._forget(tenant)
        self.count += not tenant.is_sharing
        tenant.refused_at, tenant.is_owed = now, is_owed
        self.owed += is_owed
        self._refused[tenant.name] = tenant
        if len(self._refused) > _MAX_CLAIMS:
            self._forget(next(iter(self._refused.values())))

    def settle(self, tenant: Tenant) -> None:
        """A tenant got what it was owed."""
        self.owed -= tenant.is_owed
        tenant.is_owed = False

    def expire(self, now: float) -> None:
        """Forget refusals that are too long ago."""
        while self._refused:
            first = next(iter(self._refused.values()))
            assert first.refused_at is not None
            if now - first.refused_at < _CLAIM_S:
                return
            self._forget(first)

    def _forget(self, tenant: Tenant) -> None:
        """Its refusal, if it was refused."""
        if tenant.refused_at is None:
            return
        self.settle(tenant)
        tenant.refused_at = None
        del self._refused[tenant.name]
        self.count -= not tenant.is_sharing
