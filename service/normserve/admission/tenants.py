"""The division of the budget of requests and bytes between tenants."""

from typing import NamedTuple

# How long a tenant that was refused counts among those that share.
_CLAIM_S = 2.0
# Limit of remembered refusals: an attacker may have many addresses.
_MAX_CLAIMS = 1024
# Idle tenants are removed when there are this many tenants, plus twice those left by the last removal.
_MAX_IDLE = 1024


class Tenant:
    """An API key or a client address, with the requests and bytes that its permits hold.

    Attributes:
        request_count, used_bytes: the requests and bytes of its permits.
        refused_at: when it was last refused; None if it was not refused recently.
        has_priority: whether it was refused although it had less than its share.
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
        """Whether the tenant holds permits or was refused recently."""
        return self.request_count > 0 or self.refused_at is not None


class TenantShare(NamedTuple):
    """The requests and bytes that each tenant may hold under contention; at least one request."""

    max_requests: float
    max_bytes: float

    def is_enough_for(self, requests: int, nbytes: int) -> bool:
        """Return whether these numbers of requests and bytes are within the share."""
        return requests <= self.max_requests and nbytes <= self.max_bytes


class TenantTable:
    """The tenants by name; those that hold permits or were refused recently share the budget equally.

    Some idle tenants are kept, so that a client's next request finds its tenant.  The number of kept
    tenants is bounded by the admitted requests and two constants.

    Attributes:
        by_name: all tenants in the table.
        sharing_count: the number of tenants that share the budget.
        priority_count: the number of these that were refused although they had less than their share.
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
        """Add a tenant whose name is not in the table, and return it.  If there are many tenants, idle ones are
        removed first.
        """
        if len(self.by_name) >= self._prune_count:
            for idle in [tenant.name for tenant in self.by_name.values() if not tenant.is_sharing]:
                del self.by_name[idle]
            # Pruning stays rare, however many tenants remain.
            self._prune_count = _MAX_IDLE + 2 * len(self.by_name)
        tenant = self.by_name[name] = Tenant(name)
        return tenant

    def compute_share(self, newcomer: Tenant) -> TenantShare:
        """Return the share of each tenant, counting `newcomer` as one that shares."""
        count = self.sharing_count + (not newcomer.is_sharing)
        return TenantShare(max(1.0, self._max_requests / count), self._max_bytes / count)

    def has_other_priority(self, tenant: Tenant) -> bool:
        """Return whether another tenant was refused recently although it had less than its share."""
        return self.priority_count > tenant.has_priority

    def record_refusal(self, tenant: Tenant, now: float, *, is_within_share: bool) -> None:
        """Record that a tenant was refused, and whether it had less than its share."""
        if tenant.has_priority and not is_within_share:
            return
        self._end_refusal_priority(tenant)
        self.sharing_count += not tenant.is_sharing
        tenant.refused_at, tenant.has_priority = now, is_within_share
        self.priority_count += is_within_share
        self._refused_tenants[tenant.name] = tenant
        if len(self._refused_tenants) > _MAX_CLAIMS:
            self._end_refusal_priority(next(iter(self._refused_tenants.values())))

    def clear_priority(self, tenant: Tenant) -> None:
        """End the priority of a tenant, which has been admitted or whose refusal has expired."""
        self.priority_count -= tenant.has_priority
        tenant.has_priority = False

    def expire_refusals(self, now: float) -> None:
        """Forget the refusals that are older than two seconds (`_CLAIM_S`), and the priority of the refused
        tenants.
        """
        while self._refused_tenants:
            first = next(iter(self._refused_tenants.values()))
            assert first.refused_at is not None
            if now - first.refused_at < _CLAIM_S:
                return
            self._end_refusal_priority(first)

    def _end_refusal_priority(self, tenant: Tenant) -> None:
        """Forget that a tenant was refused, and end its priority; do nothing if it was not refused recently."""
        if tenant.refused_at is None:
            return
        self.clear_priority(tenant)
        tenant.refused_at = None
        del self._refused_tenants[tenant.name]
        self.sharing_count -= not tenant.is_sharing
