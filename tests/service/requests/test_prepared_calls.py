"""What is kept of requests is bounded in bytes, shared between tenants, and never stale."""

import gc
import weakref

import pytest
from normserve.metrics.metrics import Metrics
from normserve.requests.prepared_calls import PreparedCallCache

from tests.garbage_collector import without_collector
from tests.service.jobs.fake_jobs import layer


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def calls(metrics):
    return PreparedCallCache(1000, metrics.get_prepared_call_counters("process"))


def counted(metrics, event: str, owner: str = "process") -> float:
    start = f'normserve_prepared_calls_total{{owner="{owner}",event="{event}"}} '
    (line,) = [line for line in metrics.render().decode().splitlines() if line.startswith(start)]
    return float(line.removeprefix(start))


def kept(calls, keys) -> list:
    return [key for key in keys if calls.find(key) is not None]


def test_what_was_kept_is_found_until_it_is_cleared(calls):
    assert calls.find(b"a") is None
    calls.try_store(b"a", "prepared", 10)
    assert calls.find(b"a") == "prepared"
    assert (len(calls), calls.nbytes) == (1, 10)
    calls.clear()
    assert calls.find(b"a") is None
    assert (len(calls), calls.nbytes) == (0, 0)


def test_look_ups_and_evictions_are_counted(calls, metrics):
    calls.find(b"a")
    calls.try_store(b"a", 1, 100)
    calls.find(b"a")
    calls.find(b"a")
    for number in range(10):
        calls.try_store(number, 1, 100)
    assert [counted(metrics, event) for event in ("hit", "miss", "evicted")] == [2, 1, 1]
    assert counted(metrics, "hit", "connection") == 0


def test_a_key_that_is_kept_anew_counts_once(calls):
    calls.try_store(b"a", 1, 100)
    calls.try_store(b"a", 2, 50)
    assert (calls.find(b"a"), len(calls), calls.nbytes) == (2, 1, 50)


def test_entries_of_any_size_stay_within_the_bytes(calls):
    for number in range(500):
        calls.try_store(bytes(number), number, 1 + number % 125, f"tenant {number % 7}")
        assert calls.nbytes <= 1000
    assert calls.nbytes > 800


def test_what_takes_too_much_by_itself_is_not_kept(calls):
    calls.try_store(b"small", 1, 125)
    calls.try_store(b"large", 1, 126)
    assert kept(calls, [b"small", b"large"]) == [b"small"]


def test_what_is_found_stays_longer_than_what_is_not(calls):
    calls.try_store("used", 1, 100)
    for number in range(100):
        calls.try_store(number, 1, 100)
        assert calls.find("used") == 1


def test_what_is_not_found_any_more_goes(calls):
    calls.try_store("used", 1, 100)
    calls.find("used")
    for number in range(30):
        calls.try_store(number, 1, 100)
    assert kept(calls, ["used"]) == []


def test_a_tenant_with_endless_keys_evicts_nobody_else(calls):
    mine = [("mine", number) for number in range(4)]
    for key in mine:
        calls.try_store(key, 1, 100, "mine")
    for number in range(1000):
        calls.try_store(("hostile", number), 1, 100, "hostile")
    assert kept(calls, mine) == mine
    assert calls.nbytes == 1000


def test_a_tenant_comes_in_where_another_has_everything(calls, metrics):
    for number in range(20):
        calls.try_store(("hostile", number), 1, 100, "hostile")
    mine = [("mine", number) for number in range(5)]
    for key in mine:
        calls.try_store(key, 1, 100, "mine")
    assert kept(calls, mine) == mine
    assert counted(metrics, "evicted") == 15


def test_many_tenants_leave_each_its_share(calls):
    """Who has more addresses has more shares, as of permits; who has less than one keeps it."""
    calls.try_store("mine", 1, 90, "mine")
    for number in range(200):
        calls.try_store(("hostile", number), 1, 100, f"hostile {number}")
        assert calls.nbytes <= 1000
    assert calls.find("mine") == 1


def test_a_tenant_without_entries_has_no_share(calls):
    for number in range(50):
        calls.try_store("same", number, 10, f"tenant {number}")
    for number in range(10):
        calls.try_store(number, 1, 100, "one")
    calls.try_store("same", 1, 10, "other")
    assert len(calls) == 10


def test_another_layer_of_the_name_makes_an_entry_stale(calls):
    first, second = layer("a", 4), layer("a", 4)
    calls.try_store(b"a", "first", 10, layer=first)
    assert calls.find(b"a", first) == "first"
    assert calls.find(b"a", second) is None
    # It has gone, and does not come back.
    assert calls.find(b"a", first) is None
    assert calls.nbytes == 0


@pytest.mark.parametrize("comes", [True, False])
def test_an_entry_is_found_with_a_layer_only_if_it_has_one(calls, comes):
    of_layer = layer("a", 4)
    calls.try_store(b"a", 1, 10, layer=None if comes else of_layer)
    assert calls.find(b"a", of_layer if comes else None) is None


def test_a_layer_that_has_been_removed_is_not_held(calls):
    of_layer = layer("a", 4)
    calls.try_store(b"a", 1, 10, layer=of_layer)
    gone = weakref.ref(of_layer)
    del of_layer
    gc.collect()
    assert gone() is None
    assert calls.find(b"a") is None


def test_what_is_cleared_goes_at_once(calls):
    class Prepared:
        pass

    value = Prepared()
    gone = weakref.ref(value)
    calls.try_store(b"a", value, 10)
    del value
    with without_collector():
        calls.clear()
        assert gone() is None
