"""Timing that is read when it is looked at is like any other."""

import copy
import dataclasses
import pickle

import pytest
from normserve.client.results import Timing

FIELDS = {"kernel": 1.5}, 4096, 3.2e12, 3, "abc"


@pytest.fixture
def asked():
    return []


@pytest.fixture
def later(asked):
    def understand(*said):
        asked.append(said)
        return said

    return Timing.later(understand, FIELDS)


def test_nothing_is_read_before_it_is_looked_at_and_then_once(later, asked):
    assert asked == []
    assert later.request_id == "abc"
    assert (later.stages_ms, later.kernel_bytes, later.kernel_bandwidth, later.batch_size) == FIELDS[:4]
    assert asked == [FIELDS]


@pytest.mark.parametrize(
    "seen", [copy.copy, copy.deepcopy, dataclasses.replace, lambda timing: pickle.loads(pickle.dumps(timing))]
)
def test_whatever_is_made_of_it_has_what_was_said(later, seen):
    assert seen(later) == Timing(*FIELDS)


def test_it_is_shown_and_taken_apart_as_any_other(later):
    made = Timing(*FIELDS)
    assert (later == made, repr(later), dataclasses.asdict(later)) == (True, repr(made), dataclasses.asdict(made))


def test_it_has_no_other_attributes_and_none_is_set(later, asked):
    assert not hasattr(later, "__array_interface__")
    assert asked == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        later.batch_size = 1
