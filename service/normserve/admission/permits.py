"""Permits: limits on the number of concurrent requests and on the bytes of their bodies.

A request is admitted if it fits.  Otherwise unfinished bodies are aborted to make space: those that stall, and,
for a tenant below its share, those of tenants above their share.
"""

import math
import time
from collections.abc import Callable

from normserve.admission.revocation import (
    STALLED,
    BodyRate,
    CapacityShortfall,
    RevocableBody,
    choose_permits_to_revoke,
)
from normserve.admission.tenants import Tenant, TenantTable
from normserve.errors import NormserveError, OverloadedError, RequestTimeoutError, TooLargeError

# Time constant of the release rate: older releases hardly count.
_MEMORY_S = 10.0
_LONGEST_WAIT_S = 60.0
# Wait suggested to a tenant below its share, which has priority meanwhile over tenants above theirs.
_SHORTEST_WAIT_S = 1.0
# Inspections of all bodies in the time that makes a slow body stalled.
_INSPECTIONS_PER_STALL = 8


class ReleaseRate:
    """The recent rates at which requests and bytes are released, as exponentially weighted means."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at = self._updated_at = clock()
        self._requests = 0.0
        self._bytes = 0.0

    def record_release(self, nbytes: int, requests: int = 1) -> None:
        """Record that `requests` permits were released, with `nbytes` in total."""
        now = self._clock()
        decay_factor = math.exp((self._updated_at - now) / _MEMORY_S)
        self._requests = self._requests * decay_factor + requests
        self._bytes = self._bytes * decay_factor + nbytes
        self._updated_at = now

    def estimate_seconds_for_requests(self, requests: int) -> float:
        """Estimate the seconds until this number of requests is released; 0 without recent releases."""
        return self._estimate_seconds(requests, self._requests)

    def estimate_seconds_for_bytes(self, nbytes: int) -> float:
        """Estimate the seconds until `nbytes` are released; 0 without recent releases."""
        return self._estimate_seconds(nbytes, self._bytes)

    def _estimate_seconds(self, amount: float, decayed_amount: float) -> float:
        """Estimate the seconds until `amount` is released at the recent rate; 0 without recent releases.

        Args: decayed_amount: the weighted sum of releases until `_updated_at`.
        """
        now = self._clock()
        recent_amount = decayed_amount * math.exp((self._updated_at - now) / _MEMORY_S)
        # Soon after the start, the means cover less than the time constant.
        span = _MEMORY_S * (1 - math.exp((self._started_at - now) / _MEMORY_S))
        return amount * span / recent_amount if recent_amount else 0.0


class AdmissionBudget:
    """The server's limits of concurrent requests and of their bytes: a request is admitted at once, or refused.

    Not thread-safe: it belongs to the event loop's thread.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_bytes: int,
        stall_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        on_revoked: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Args:
        stall_s: a body that was too slow for this time can be aborted for another request.
        on_revoked: called for each revoked permit with the reason, one of `revocation.REASONS`.
        """
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._stall_s = stall_s
        self._clock = clock
        self._on_revoked = on_revoked
        self.request_count = 0
        self.used_bytes = 0
        self._release_rate = ReleaseRate(clock)
        self._tenants = TenantTable(max_requests=max_requests, max_bytes=max_bytes)
        self._tenants_by_name = self._tenants.by_name
        # Permits whose body is still being received, in the order of their beginning.
        self._body_rates: dict[Permit, BodyRate] = {}
        self._next_inspection_at = clock()

    @property
    def tenant_count(self) -> int:
        """The number of tenants that hold permits or were refused recently."""
        return self._tenants.sharing_count

    def acquire(self, nbytes: int, tenant: str = "", max_inflight_bytes: int | None = None) -> "Permit":
        """Admit one request of `nbytes`, and return its permit.  If it does not fit, other requests may be aborted
        while their bodies are still being received.

        Args:
            tenant: the tenant to which the request is charged.
            max_inflight_bytes: limit of the bytes of all that tenant's requests together; None is no limit.

        Raises:
            OverloadedError: the budget of requests or of bytes is spent, or the tenant's own is; its retry
                time is the estimated time until the current requests have been released.
            TooLargeError: `max_inflight_bytes` is less than `nbytes`.
        """
        holder = self._tenants_by_name.get(tenant) or self._tenants.add_tenant(tenant)
        if max_inflight_bytes is not None:
            self._require_tenant_limit(max_inflight_bytes, holder, nbytes)
        if (
            self.request_count >= self._max_requests
            or self.used_bytes + nbytes > self._max_bytes
            or self._tenants.priority_count
        ):
            self._make_room(holder, 1, nbytes, None)
        if not holder.request_count and holder.refused_at is None:
            self._tenants.sharing_count += 1
        holder.request_count += 1
        holder.used_bytes += nbytes
        self.request_count += 1
        self.used_bytes += nbytes
        permit = Permit(self, holder, nbytes)
        if max_inflight_bytes is not None:
            permit.max_inflight_bytes = max_inflight_bytes
        return permit

    @property
    def admissible_capacity(self) -> tuple[int, int]:
        """The number of requests and of bytes that are free; (0, 0) while a refused tenant has priority."""
        if self._tenants.priority_count:
            return 0, 0
        return self._max_requests - self.request_count, self._max_bytes - self.used_bytes

    def adjust_unpermitted(self, requests: int, nbytes: int) -> None:
        """Charge requests without permits that fit into `admissible_capacity`; negative numbers release them."""
        self.request_count += requests
        self.used_bytes += nbytes

    def record_unpermitted_release(self, requests: int, nbytes: int) -> None:
        """Record the release of requests without permits for the release rate."""
        self._release_rate.record_release(nbytes, requests)

    def grow_permit(self, permit: "Permit", nbytes: int) -> None:
        """Add `nbytes` to a permit, which must be neither released nor revoked.  Only `Permit.grow` calls this.

        Raises:
            OverloadedError: the budget or the tenant's limit is spent; the permit is unchanged.
            TooLargeError: the tenant's limit is less than `nbytes`.
        """
        holder = permit.tenant
        if permit.max_inflight_bytes is not None:
            self._require_tenant_limit(permit.max_inflight_bytes, holder, nbytes)
        if self.used_bytes + nbytes > self._max_bytes or self._tenants.priority_count:
            self._make_room(holder, 0, nbytes, permit)
        holder.used_bytes += nbytes
        self.used_bytes += nbytes
        permit.nbytes += nbytes

    def release_permit(self, permit: "Permit") -> None:
        """Release a permit that was not revoked; each permit calls this once."""
        self._subtract_permit(permit)
        self._release_rate.record_release(permit.nbytes)

    def start_receiving(self, permit: "Permit", body: RevocableBody, due_bytes_per_s: float) -> None:
        """Make a permit revocable while its body is received; see `Permit.start_receiving`."""
        self._body_rates[permit] = BodyRate(body, due_bytes_per_s, self._stall_s, self._clock())

    def end_receiving(self, permit: "Permit") -> None:
        """End the time in which a permit is revocable: its body is complete, or will not be."""
        del self._body_rates[permit]

    def abort_bodies(self, error: NormserveError) -> None:
        """Abort every body that is still being received, because the server ends; its client gets `error`."""
        # An aborted body may release its permit at once.
        for rate in list(self._body_rates.values()):
            rate.body.abort(error)

    def _subtract_permit(self, permit: "Permit") -> None:
        """Subtract a permit's request and bytes from its tenant's counts and from the totals of all tenants."""
        holder = permit.tenant
        holder.request_count -= 1
        holder.used_bytes -= permit.nbytes
        self.request_count -= 1
        self.used_bytes -= permit.nbytes
        if not holder.request_count and holder.refused_at is None:
            self._tenants.sharing_count -= 1

    def _require_tenant_limit(self, limit: int, holder: Tenant, nbytes: int) -> None:
        """Refuse `nbytes` more for a tenant if all its requests together would exceed its limit.

        Raises:
            TooLargeError: these bytes alone exceed the limit.
            OverloadedError: the tenant's other requests leave too few bytes.
        """
        if holder.used_bytes + nbytes <= limit:
            return
        if nbytes > limit:
            raise TooLargeError(f"{nbytes} bytes are more than this key's max_inflight_bytes, {limit}")
        raise OverloadedError(
            f"{nbytes} more bytes do not fit beside {holder.used_bytes} of this key's max_inflight_bytes, {limit}",
            _clamp_retry_after(self._release_rate.estimate_seconds_for_bytes(holder.used_bytes)),
        )

    def _make_room(self, holder: Tenant, requests: int, nbytes: int, growing_permit: "Permit | None") -> None:
        """Revoke permits of unfinished bodies until a tenant's request fits; refuse the request if too few can
        be revoked.

        Also refuse a tenant beyond its share while another tenant has priority.

        Args: growing_permit: the permit that grows, which is not revoked; None for a new request.

        Raises:
            OverloadedError: the request is refused.
        """
        now = self._clock()
        tenants = self._tenants
        tenants.expire_refusals(now)
        share = tenants.compute_share(holder)
        is_within_share = share.is_enough_for(holder.request_count + requests, holder.used_bytes + nbytes)
        if is_within_share or not tenants.has_other_priority(holder):
            lacking = CapacityShortfall(
                self.request_count + requests - self._max_requests, self.used_bytes + nbytes - self._max_bytes
            )
            revoked = choose_permits_to_revoke(
                ((permit, inflow) for permit, inflow in self._body_rates.items() if permit is not growing_permit),
                lacking,
                # Only for a tenant within its share are permits of tenants above theirs revoked.
                share if is_within_share else None,
                now,
                measures_all=not lacking.is_covered and self._try_begin_inspection(now),
            )
            if revoked is not None:
                for permit, reason in revoked:
                    self._revoke(permit, reason)
                tenants.clear_priority(holder)
                return
        error = self._make_refusal(requests, nbytes, is_within_share)
        tenants.record_refusal(holder, now, is_within_share=is_within_share)
        raise error

    def _try_begin_inspection(self, now: float) -> bool:
        """Return whether the rates of all bodies may be measured now; if so, delay the next measurement.

        The limit keeps refusals cheap when there are many.
        """
        if now < self._next_inspection_at:
            return False
        self._next_inspection_at = now + self._stall_s / _INSPECTIONS_PER_STALL
        return True

    def _make_refusal(self, requests: int, nbytes: int, is_within_share: bool) -> OverloadedError:
        """Make the error for a request that does not fit: which limit is reached, and when to try again.

        A tenant within its share has priority, and is asked to try again soon.
        """
        if self.request_count + requests > self._max_requests:
            detail = f"{self.request_count} requests are in flight, no more than that are admitted"
            wait_s = self._release_rate.estimate_seconds_for_requests(self.request_count)
        elif self.used_bytes + nbytes > self._max_bytes:
            detail = (
                f"{nbytes} more bytes do not fit beside {self.used_bytes} in flight of {self._max_bytes} admitted"
            )
            wait_s = self._release_rate.estimate_seconds_for_bytes(self.used_bytes)
        else:
            detail = "others have less than their share and come first"
            wait_s = self._release_rate.estimate_seconds_for_requests(self.request_count)
        return OverloadedError(detail, _SHORTEST_WAIT_S if is_within_share else _clamp_retry_after(wait_s))

    def _revoke(self, permit: "Permit", reason: str) -> None:
        """Take back a permit's request and bytes, and abort its body with an error that depends on the reason."""
        inflow = self._body_rates[permit]
        permit.mark_revoked()
        self._subtract_permit(permit)
        self._on_revoked(reason)
        error: NormserveError
        if reason is STALLED:
            error = RequestTimeoutError("the body arrived too slowly while other requests waited for its memory")
        else:
            error = OverloadedError(
                "the body was cut off in favour of a client below its share of the server",
                _clamp_retry_after(self._release_rate.estimate_seconds_for_bytes(self.used_bytes)),
            )
        inflow.body.abort(error)


def _clamp_retry_after(seconds: float) -> float:
    return min(max(1.0, seconds), _LONGEST_WAIT_S)


class Permit:
    """The right of one request to be in progress, and to use memory.

    Release it when the response's last byte is sent, or once the client has disconnected and the device no longer
    works on the request.  While the request's body is being received, from `start_receiving` to `complete_body`,
    it may be revoked.

    Attributes:
        tenant: the tenant to which the permit is charged.
        max_inflight_bytes: limit of the bytes of all that tenant's requests together; None is no limit.
        nbytes: the bytes of the budget that the permit holds.
    """

    # Defaults are class attributes, since most permits never change them.
    max_inflight_bytes: int | None = None
    _is_receiving = False
    _is_revoked = False

    def __init__(self, limits: AdmissionBudget, tenant: Tenant, nbytes: int) -> None:
        self._budget: AdmissionBudget | None = limits
        self.tenant = tenant
        self.nbytes = nbytes

    def grow(self, nbytes: int) -> None:
        """Add `nbytes` to the permit, for a body of unannounced length or for the memory of the computation.

        Raises:
            OverloadedError: a budget is spent, or the permit was revoked; `nbytes` is unchanged.
            TooLargeError: the tenant's own budget is less than `nbytes`.
        """
        if self._is_revoked:
            raise OverloadedError("the permit was revoked while the body was received")
        if self._budget is not None:
            self._budget.grow_permit(self, nbytes)

    def start_receiving(self, body: RevocableBody, due_bytes_per_s: float) -> None:
        """Allow the budget to revoke the permit while its body is received, until `complete_body`.

        Args: due_bytes_per_s: a body that is slower than this can be aborted for another request.
        """
        if self._budget is not None:
            self._is_receiving = True
            self._budget.start_receiving(self, body, due_bytes_per_s)

    def complete_body(self) -> None:
        """Make the permit irrevocable, because its body is no longer being received."""
        if self._is_receiving and self._budget is not None:
            self._is_receiving = False
            self._budget.end_receiving(self)

    def mark_revoked(self) -> None:
        """Mark the permit as revoked, so that it cannot grow and its release does nothing.

        Called by the budget, which takes the permit's request and bytes back itself.
        """
        self.complete_body()
        self._budget = None
        self._is_revoked = True

    def release(self) -> None:
        """Release the permit's request and bytes; do nothing if it was released or revoked before."""
        if self._is_receiving:
            self.complete_body()
        limits, self._budget = self._budget, None
        if limits is not None:
            limits.release_permit(self)
