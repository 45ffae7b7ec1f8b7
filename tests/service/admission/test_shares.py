"""Whose place a newcomer takes: of bodies that stall, and of tenants above their share."""

import contextlib

import pytest
from normserve.admission.permits import AdmissionBudget, Permit
from normserve.errors import DrainingError, OverloadedError, RequestTimeoutError


class Body:
    """One that comes as a test says."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self.is_complete = False
        self.failure: Exception | None = None

    def abort(self, error: Exception) -> None:
        self.failure = error


DUE = 100.0


def receiving(limits: AdmissionBudget, nbytes: int = 0, tenant: str = "") -> tuple[Permit, Body]:
    """A permit whose body is being received."""
    body = Body()
    permit = limits.acquire(nbytes, tenant)
    permit.start_receiving(body, DUE)
    return permit, body


def test_at_the_end_of_the_server_every_body_that_is_still_received_is_aborted(now):
    class Leaving(Body):
        """One that gives its permit back at once."""

        def abort(self, error: Exception) -> None:
            super().abort(error)
            leaving.release()

    limits = AdmissionBudget(max_requests=4, max_bytes=1000, clock=lambda: now[0])
    (_, kept), (complete, whole) = receiving(limits), receiving(limits)
    complete.complete_body()
    leaving, left = limits.acquire(0), Leaving()
    leaving.start_receiving(left, DUE)
    error = DrainingError("the end")
    limits.abort_bodies(error)
    assert [body.failure for body in (kept, left, whole)] == [error, error, None]
    assert limits.request_count == 2


class TestBodiesThatStall:
    @pytest.fixture
    def revoked(self) -> list[str]:
        return []

    @pytest.fixture
    def limits(self, now, revoked) -> AdmissionBudget:
        return AdmissionBudget(max_requests=4, max_bytes=1000, clock=lambda: now[0], on_revoked=revoked.append)

    def test_their_requests_are_given_to_those_that_come(self, limits, now, revoked):
        bodies = [receiving(limits)[1] for _ in range(4)]
        now[0] += 2
        limits.acquire(0)
        assert limits.request_count == 4
        assert revoked == ["stalled"]
        assert [type(body.failure) for body in bodies].count(RequestTimeoutError) == 1

    def test_and_their_bytes(self, limits, now):
        _, body = receiving(limits, 1000)
        now[0] += 2
        limits.acquire(10)
        assert limits.used_bytes == 10
        assert isinstance(body.failure, RequestTimeoutError)

    def test_while_there_is_room_nobody_minds_them(self, limits, now):
        _, body = receiving(limits, 500)
        now[0] += 1000
        limits.acquire(500)
        assert body.failure is None

    def test_a_body_that_grows_may_take_from_others_and_not_from_itself(self, limits, now):
        growing, own = receiving(limits, 400)
        _, other = receiving(limits, 400)
        now[0] += 2
        growing.grow(500)
        assert own.failure is None
        assert other.failure is not None
        assert limits.used_bytes == growing.nbytes == 900
        with pytest.raises(OverloadedError):
            growing.grow(101)
        assert own.failure is None

    def test_what_was_revoked_cannot_grow_and_gives_nothing_back(self, limits, now):
        permit, _ = receiving(limits, 1000)
        now[0] += 2
        limits.acquire(10)
        with pytest.raises(OverloadedError, match="revoked"):
            permit.grow(1)
        permit.complete_body()
        permit.release()
        assert (limits.request_count, limits.used_bytes) == (1, 10)

    def test_what_has_left_is_not_cut_off(self, limits, now):
        permit, body = receiving(limits, 1000)
        permit.release()
        limits.acquire(1000)
        now[0] += 2
        with pytest.raises(OverloadedError):
            limits.acquire(10)
        assert body.failure is None

    def test_a_body_that_is_whole_is_never_cut_off(self, limits, now):
        permit, told = receiving(limits, 500)
        permit.complete_body()
        _, not_yet_told = receiving(limits, 500)
        not_yet_told.is_complete = True
        now[0] += 1000
        with pytest.raises(OverloadedError):
            limits.acquire(10)
        assert told.failure is not_yet_told.failure is None

    def test_a_flood_of_what_cannot_fit_keeps_no_stalled_body_alive(self, limits, now):
        limits.acquire(500)
        for _ in range(3):
            receiving(limits, 1)
        now[0] += 2
        for _ in range(100):
            with pytest.raises(OverloadedError):
                limits.acquire(1000)
        limits.acquire(0)
        assert limits.request_count == 4

    def test_requests_that_fit_put_off_no_look(self, limits, now):
        held = [limits.acquire(0, "many") for _ in range(3)]
        receiving(limits, 0, "third")
        with pytest.raises(OverloadedError):
            limits.acquire(0, "few")
        held[0].release()
        now[0] += 1.9
        limits.acquire(0, "few")
        now[0] += 0.1
        limits.acquire(0, "few")

    def test_nobody_is_cut_off_for_one_that_is_refused_all_the_same(self, limits, now):
        limits.acquire(500)
        _, body = receiving(limits, 500)
        now[0] += 1000
        with pytest.raises(OverloadedError):
            limits.acquire(501)
        assert body.failure is None


class TestShares:
    @pytest.fixture
    def revoked(self) -> list[str]:
        return []

    @pytest.fixture
    def limits(self, now, revoked) -> AdmissionBudget:
        return AdmissionBudget(max_requests=8, max_bytes=1000, clock=lambda: now[0], on_revoked=revoked.append)

    @staticmethod
    def refused(limits, nbytes: int = 0, tenant: str = "") -> OverloadedError:
        with pytest.raises(OverloadedError) as refused:
            limits.acquire(nbytes, tenant)
        return refused.value

    def test_one_alone_may_have_all(self, limits):
        for _ in range(8):
            limits.acquire(125, "one")
        assert (limits.request_count, limits.used_bytes) == (8, 1000)

    def test_whoever_comes_next_gets_its_share_at_once(self, limits, revoked):
        """Of what is still being received, however fast that is."""
        bodies = [receiving(limits, 125, "many")[1] for _ in range(8)]
        for _ in range(4):
            limits.acquire(125, "few")
        assert revoked == ["share"] * 4
        assert [isinstance(body.failure, OverloadedError) for body in bodies].count(True) == 4
        self.refused(limits, 0, "few")
        self.refused(limits, 0, "many")
        assert len(revoked) == 4

    def test_what_is_computed_is_waited_for_and_the_flood_with_it(self, limits):
        computed = [limits.acquire(125, "many") for _ in range(8)]
        self.refused(limits, 125, "few")
        for permit in computed[:3]:
            permit.release()
            assert "less than their share" in str(self.refused(limits, 0, "many"))
        limits.acquire(125, "few")
        # It has what it wanted.
        limits.acquire(0, "many")

    def test_a_place_is_not_kept_for_long(self, limits, now):
        computed = [limits.acquire(0, "many") for _ in range(8)]
        self.refused(limits, 0, "few")
        computed[0].release()
        now[0] += 1.99
        self.refused(limits, 0, "many")
        now[0] += 0.01
        limits.acquire(0, "many")

    def test_who_wants_more_than_its_share_has_no_place_kept(self, limits):
        computed = [limits.acquire(125, "many") for _ in range(8)]
        self.refused(limits, 501, "greedy")
        computed[0].release()
        limits.acquire(0, "many")

    def test_nor_takes_anything_from_others(self, limits):
        limits.acquire(0, "third")
        bodies = [receiving(limits, 250, "many")[1] for _ in range(4)]
        self.refused(limits, 400, "greedy")
        assert all(body.failure is None for body in bodies)

    def test_nor_loses_the_one_that_it_has_for_less(self, limits):
        computed = [limits.acquire(125, "many") for _ in range(8)]
        self.refused(limits, 1, "few")
        self.refused(limits, 900, "few")
        computed[0].release()
        self.refused(limits, 0, "many")
        limits.acquire(1, "few")

    def test_nor_is_it_kept_from_itself(self, limits):
        computed = [limits.acquire(125, "many") for _ in range(8)]
        self.refused(limits, 1, "few")
        for permit in computed[1:]:
            permit.release()
        limits.acquire(600, "few")

    def test_one_request_is_within_any_share(self, now):
        limits = AdmissionBudget(max_requests=2, max_bytes=1000, clock=lambda: now[0])
        computed = [limits.acquire(0, "a"), limits.acquire(0, "b")]
        for name in "cde":
            self.refused(limits, 0, name)
        computed[0].release()
        self.refused(limits, 0, "b")
        limits.acquire(0, "e")

    def test_those_within_their_share_lose_nothing_to_one_that_comes(self, limits):
        bodies = [receiving(limits, 0, tenant)[1] for tenant in "abcdefgh"]
        self.refused(limits, 0, "i")
        assert all(body.failure is None for body in bodies)

    def test_many_addresses_are_not_remembered_for_ever(self, limits, now):
        for _ in range(8):
            limits.acquire(0, "one")
        for number in range(5000):
            self.refused(limits, 0, str(number))
            assert limits.tenant_count <= 1 + 1024
        now[0] += 2
        with contextlib.suppress(OverloadedError):
            limits.acquire(0, "one")
        assert limits.tenant_count == 1

    def test_many_addresses_one_after_another_take_no_memory(self, limits):
        for number in range(5000):
            limits.acquire(0, str(number)).release()
        assert limits.tenant_count == 0
        assert len(limits._tenants.by_name) <= 1024
