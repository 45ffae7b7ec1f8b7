"""Whose body gives way."""

from dataclasses import dataclass, field

import pytest
from normserve.admission.revocation import SHARE, STALLED, BodyRate, CapacityShortfall, choose_permits_to_revoke
from normserve.admission.tenants import Tenant, TenantShare


@dataclass(eq=False)
class Body:
    received_bytes: int = 0
    is_complete: bool = False


@dataclass(eq=False)
class Held:
    tenant: Tenant
    nbytes: int
    body: Body = field(default_factory=Body)


class Scene:
    """Permits whose bodies began at 0 and are due at 100 bytes a second."""

    def __init__(self) -> None:
        self.inflows: dict[Held, BodyRate] = {}
        self.tenants: dict[str, Tenant] = {}

    def add(self, nbytes: int = 10, tenant: str = "", began: float = 0.0) -> Held:
        holder = self.tenants.setdefault(tenant, Tenant(tenant))
        holder.request_count += 1
        holder.used_bytes += nbytes
        held = Held(holder, nbytes)
        self.inflows[held] = BodyRate(held.body, 100.0, 2.0, began)
        return held

    def chosen(self, now: float, requests: int = 0, nbytes: int = 0, share: TenantShare | None = None):
        return choose_permits_to_revoke(self.inflows.items(), CapacityShortfall(requests, nbytes), share, now)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_where_nothing_lacks_nobody_gives_way(scene):
    scene.add()
    assert scene.chosen(10.0) == []


def test_a_body_that_stalls_gives_way(scene):
    held = scene.add()
    assert scene.chosen(10.0, 1) == [(held, STALLED)]


def test_a_body_has_some_time_to_begin(scene):
    scene.add()
    assert scene.chosen(1.9, 1) is None
    assert scene.chosen(2.0, 1) is not None


def test_a_body_that_comes_as_it_is_due_does_not(scene):
    held = scene.add()
    held.body.received_bytes = 1000
    assert scene.chosen(10.0, 1) is None


def test_a_body_that_comes_no_more_does(scene):
    """Whatever came before."""
    held = scene.add()
    held.body.received_bytes = 10**6
    assert scene.chosen(10.0, 1) is None
    assert scene.chosen(11.9, 1) is None
    assert scene.chosen(12.0, 1) == [(held, STALLED)]


def test_a_body_that_comes_again_does_not(scene):
    held = scene.add()
    assert scene.chosen(10.0, 5) is None
    held.body.received_bytes = 200
    assert scene.chosen(10.5, 1) is None


def test_a_whole_body_does_not(scene):
    held = scene.add()
    held.body.is_complete = True
    assert scene.chosen(10.0, 1) is None
    assert scene.chosen(10.0, 1, share=TenantShare(0, 0)) is None


def test_the_slowest_come_first_and_of_equals_the_largest(scene):
    bodies = [scene.add(nbytes=nbytes) for nbytes in (10, 20, 30, 40)]
    for held, received in zip(bodies, (0, 50, 0, 20), strict=True):
        held.body.received_bytes = received
    order = [bodies[2], bodies[0], bodies[3], bodies[1]]
    for count in range(1, 5):
        assert [held for held, _ in scene.chosen(10.0, count)] == order[:count]


def test_nobody_gives_way_in_vain(scene):
    scene.add(nbytes=10)
    assert scene.chosen(10.0, 0, 11) is None
    assert scene.chosen(10.0, 2) is None


def test_no_more_give_way_than_need_to(scene):
    silent = [scene.add(nbytes=0) for _ in range(5)]
    large = scene.add(nbytes=100)
    large.body.received_bytes = 1
    assert scene.chosen(10.0, 1, 50) == [(large, STALLED)]
    assert len(scene.chosen(10.0, 2, 50)) == 2
    assert [held for held, _ in scene.chosen(10.0, 1)] == silent[:1]


class TestShares:
    share = TenantShare(2, 100)

    def test_tenants_above_theirs_give_way_to_one_below(self, scene):
        many = [scene.add(tenant="many", began=9.0) for _ in range(3)]
        scene.add(tenant="few", began=9.0)
        assert scene.chosen(10.0, 1) is None
        assert scene.chosen(10.0, 1, share=self.share) == [(many[0], SHARE)]

    def test_but_not_below_their_share(self, scene):
        for _ in range(3):
            scene.add(tenant="many", began=9.0)
        assert scene.chosen(10.0, 2, share=self.share) is None

    def test_what_counts_is_the_share_of_what_lacks(self, scene):
        large = scene.add(nbytes=500, tenant="large", began=9.0)
        assert scene.chosen(10.0, 1, share=self.share) is None
        assert scene.chosen(10.0, 0, 1, share=self.share) == [(large, SHARE)]

    def test_stalled_ones_of_anybody_come_first(self, scene):
        stalled = scene.add(tenant="few", began=0.0)
        for _ in range(3):
            scene.add(tenant="many", began=9.0)
        assert scene.chosen(10.0, 1, share=self.share) == [(stalled, STALLED)]
        assert scene.chosen(10.0, 2, share=self.share)[1][1] == SHARE
