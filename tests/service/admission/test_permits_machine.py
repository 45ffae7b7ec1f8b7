"""Whatever happens to permits, in whatever order: the budget is kept, and all of it comes home."""

import contextlib
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from normserve.admission.permits import AdmissionBudget, Permit
from normserve.errors import NormserveError, OverloadedError, RequestTimeoutError, TooLargeError

MAX_REQUESTS, MAX_BYTES, MAX_OF_KEY = 4, 100, 50
TENANTS = ("a", "b", "key:c")


@dataclass(eq=False)
class Held:
    """A permit and its body."""

    permit: Permit
    tenant: str
    nbytes: int
    is_receiving: bool = False
    received_bytes: int = 0
    is_complete: bool = False
    failures: list[NormserveError] = field(default_factory=list)

    def abort(self, error: NormserveError) -> None:
        assert self.is_receiving, "only what is being received is cut off"
        assert not self.is_complete
        self.failures.append(error)


class Machine(RuleBasedStateMachine):
    """Requests that come, receive, grow, are revoked and end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.revoked: list[str] = []
        self.limits = AdmissionBudget(
            max_requests=MAX_REQUESTS, max_bytes=MAX_BYTES, clock=lambda: self.now, on_revoked=self.revoked.append
        )
        self.all: list[Held] = []
        self.cut_off: list[Held] = []

    @property
    def inside(self) -> list[Held]:
        return [held for held in self.all if not held.failures]

    def pick(self, data: st.DataObject) -> Held:
        return data.draw(st.sampled_from(self.inside))

    @rule(tenant=st.sampled_from(TENANTS), nbytes=st.sampled_from((0, 1, 20, 34, 50, 100, 101)))
    def come(self, tenant: str, nbytes: int) -> None:
        most = MAX_OF_KEY if tenant.startswith("key:") else None
        with contextlib.suppress(OverloadedError, TooLargeError):
            self.all.append(Held(self.limits.acquire(nbytes, tenant, most), tenant, nbytes))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        held = self.pick(data)
        if not held.is_receiving and not held.is_complete:
            held.is_receiving = True
            held.permit.start_receiving(held, 10.0)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), nbytes=st.integers(1, 100))
    def bring(self, data: st.DataObject, nbytes: int) -> None:
        held = self.pick(data)
        held.received_bytes += nbytes * held.is_receiving

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), is_told=st.booleans())
    def complete(self, data: st.DataObject, is_told: bool) -> None:
        """The permit may hear of it later than the body does."""
        held = self.pick(data)
        held.is_complete = held.is_complete or held.is_receiving
        if is_told:
            held.permit.complete_body()
            held.is_receiving, held.is_complete = False, True

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), nbytes=st.sampled_from((0, 1, 30, 60)))
    def grow(self, data: st.DataObject, nbytes: int) -> None:
        held = self.pick(data)
        with contextlib.suppress(OverloadedError, TooLargeError):
            held.permit.grow(nbytes)
            held.nbytes += nbytes

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Also of one that was revoked, and twice."""
        held = data.draw(st.sampled_from(self.all))
        held.permit.release()
        held.permit.release()
        self.all.remove(held)
        self.cut_off += [held] if held.failures else []

    @rule(seconds=st.sampled_from((0.1, 1.0, 2.0, 5.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def what_is_counted_is_what_is_held(self) -> None:
        assert self.limits.request_count == len(self.inside) <= MAX_REQUESTS
        assert self.limits.used_bytes == sum(held.nbytes for held in self.inside) <= MAX_BYTES
        for name in TENANTS:
            tenant = self.limits._tenants.by_name.get(name)
            own = [held.nbytes for held in self.inside if held.tenant == name]
            assert (tenant.request_count, tenant.used_bytes) == (len(own), sum(own)) if tenant else not own

    @invariant()
    def no_key_has_more_than_it_may(self) -> None:
        assert sum(held.nbytes for held in self.inside if held.tenant == "key:c") <= MAX_OF_KEY

    @invariant()
    def each_is_cut_off_once_and_told_why(self) -> None:
        failures = [held.failures for held in (*self.all, *self.cut_off) if held.failures]
        assert all(len(each) == 1 for each in failures)
        stalled = sum(isinstance(each[0], RequestTimeoutError) for each in failures)
        assert (self.revoked.count("stalled"), self.revoked.count("share")) == (stalled, len(failures) - stalled)

    @invariant()
    def those_that_share_are_counted(self) -> None:
        tenants = self.limits._tenants
        assert tenants.sharing_count == sum(each.is_sharing for each in tenants.by_name.values())
        assert tenants.priority_count == sum(each.has_priority for each in tenants.by_name.values())

    def teardown(self) -> None:
        for held in self.all:
            held.permit.release()
        assert (self.limits.request_count, self.limits.used_bytes) == (0, 0)
        assert not self.limits._body_rates
        self.now += 10
        # All is free again, whoever was owed something.
        self.limits.acquire(MAX_BYTES, "d").release()
        self.limits._tenants.expire_refusals(self.now)
        assert self.limits.tenant_count == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=40)
