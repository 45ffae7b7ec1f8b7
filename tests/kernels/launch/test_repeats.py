"""How many kinds of calls are kept, whoever learns them."""

from concurrent.futures import ThreadPoolExecutor

from fusednorm.launch import repeats


def test_the_oldest_kind_goes_first(monkeypatch):
    monkeypatch.setattr(repeats, "MAX_KINDS", 2)
    known = {}
    for kind in ("a", "b", "a", "c"):
        repeats.keep(known, kind, kind.upper())
    assert known == {"b": "B", "c": "C"}


def test_what_is_learnt_again_costs_no_other_kind(monkeypatch):
    monkeypatch.setattr(repeats, "MAX_KINDS", 2)
    known = {"a": 1, "b": 2}
    repeats.keep(known, "b", 3)
    assert known == {"a": 1, "b": 3}


def test_many_threads_keep_the_bound(monkeypatch):
    monkeypatch.setattr(repeats, "MAX_KINDS", 3)
    known = {}
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda kind: repeats.keep(known, kind % 7, kind), range(2000)))
    assert len(known) == 3
