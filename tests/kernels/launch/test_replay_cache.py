"""How many kinds of calls are kept, whoever learns them; kinds themselves are tested with each operation."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from fusednorm.launch import replay_cache


@pytest.fixture
def known(monkeypatch):
    kinds = {}
    monkeypatch.setattr(replay_cache, "_KNOWN", kinds)
    return kinds


def test_the_oldest_kind_goes_first(known, monkeypatch):
    monkeypatch.setattr(replay_cache, "MAX_KINDS", 2)
    for kind in ("a", "b", "a", "c"):
        replay_cache._store_replay(kind, kind.upper())
    assert known == {"b": "B", "c": "C"}


def test_what_is_learnt_again_costs_no_other_kind(known, monkeypatch):
    monkeypatch.setattr(replay_cache, "MAX_KINDS", 2)
    for kind, call in (("a", 1), ("b", 2), ("b", 3)):
        replay_cache._store_replay(kind, call)
    assert known == {"a": 1, "b": 3}


def test_many_threads_keep_the_bound(known, monkeypatch):
    monkeypatch.setattr(replay_cache, "MAX_KINDS", 3)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda kind: replay_cache._store_replay(kind % 7, kind), range(2000)))
    assert len(known) == 3
