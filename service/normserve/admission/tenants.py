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
        request_count, used_bytes: what it holds.
        refused_at: when it was last refused, while that counts.
        has_priority: it was refused although it had less than its share.
    """

    __slots__ = ("has_priority", "name", "refused_at", "request_count", "used_bytes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.request_count = 0
        self.used_bytes = 0
        self.refused_at: float | None = None
        self.has_priority = False

    @property
    def is_sharing(self) -> bool:
        """It holds something, or wanted to of late."""
        return self.request_count > 0 or self.refused_at is not None


class TenantShare(NamedTuple):
    """What each tenant may hold while others want it, too; one request in any case."""

    max_requests: float
    max_bytes: float

    def is_enough_for(self, requests: int, nbytes: int) -> bool:
        """Whether a tenant that holds so much is within its share."""
        return requests <= self.max_requests and nbytes <= self.max_bytes


class TenantTable:
    """Those that hold something or were refused of late; each one's share is the budget over their number.

    Some that neither hold anything nor were refused are kept, so that a client's next request finds its tenant.
    How many are remembered is bounded by the admitted requests and two constants.

    Attributes:
        by_name: all that are remembered.
        sharing_count: those among whom the budget is shared.
        priority_count: how many of these were refused although they had less than their share.
    """

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._refused_tenants: dict[str, Tenant] = {}  # in the order of their last refusal
        self._prune_count = _MAX_IDLE
        self.by_name: dict[str, Tenant] = {}
        self.sharing_count = 0
        self.priority_count = 0

    def add_tenant(self, name: str) -> Tenant:
        """One that is not known."""
        if len(self.by_name) >= self._prune_count:
            for idle in [tenant.name for tenant in self.by_name.values() if not tenant.is_sharing]:
                del self.by_name[idle]
            # Few enough calls of this, however many remain.
            self._prune_count = _MAX_IDLE + 2 * len(self.by_name)
        tenant = self.by_name[name] = Tenant(name)
        return tenant

    def compute_share(self, newcomer: Tenant) -> TenantShare:
        """What is each one's, a newcomer's as well."""
        count = self.sharing_count + (not newcomer.is_sharing)
        return TenantShare(max(1.0, self._max_requests / count), self._max_bytes / count)

    def has_other_priority(self, tenant: Tenant) -> bool:
        """Whether another tenant was refused of late although it had less than its share."""
        return self.priority_count > tenant.has_priority

    def record_refusal(self, tenant: Tenant, now: float, *, is_owed: bool) -> None:
        """Remember that a tenant was refused, and whether it had less than its share."""
        if tenant.has_priority and not is_owed:
            return
        self._remove_refusal(tenant)
        self.sharing_count += not tenant.is_sharing
        tenant.refused_at, tenant.has_priority = now, is_owed
        self.priority_count += is_owed
        self._refused_tenants[tenant.name] = tenant
        if len(self._refused_tenants) > _MAX_CLAIMS:
            self._remove_refusal(next(iter(self._refused_tenants.values())))

    def clear_priority(self, tenant: Tenant) -> None:
        """A tenant got what it was owed."""
        self.priority_count -= tenant.has_priority
        tenant.has_priority = False

    def expire_refusals(self, now: float) -> None:
        """Forget refusals that are too long ago."""
        while self._refused_tenants:
            first = next(iter(self._refused_tenants.values()))
            assert first.refused_at is not None
            if now - first.refused_at < _CLAIM_S:
                return
            self._remove_refusal(first)

    def _remove_refusal(self, tenant: Tenant) -> None:
        """Its refusal, if it was refused."""
        if tenant.refused_at is None:
            return
        self.clear_priority(tenant)
        tenant.refused_at = None
        del self._refused_tenants[tenant.name]
        self.sharing_count -= not tenant.is_sharing
