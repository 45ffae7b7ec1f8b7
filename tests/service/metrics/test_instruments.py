"""Counting, and what is told of it."""

import math

import pytest
from normserve.metrics.instruments import Counter, Histogram, MetricFamily


def test_counter_adds():
    counter = Counter()
    counter.inc()
    counter.inc(0.5)
    assert counter.value == 1.5


def test_value_on_a_bound_is_within_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, math.inf):
        histogram.observe(value)
    assert list(histogram.iterate_cumulative()) == [(1.0, 2), (2.0, 4), (math.inf, 6)]


@pytest.mark.parametrize("count", [0, 3, 100])
def test_many_values_count_as_one_by_one(count):
    values = [bound + step for bound in (0.5, 1.0, 2.0) for step in (-0.1, 0.0, 0.1)] * count
    at_once, singly = Histogram((0.5, 1.0, 2.0)), Histogram((0.5, 1.0, 2.0))
    at_once.observe_many(values)
    for value in values:
        singly.observe(value)
    assert list(at_once.iterate_cumulative()) == list(singly.iterate_cumulative())
    assert at_once.sum == pytest.approx(singly.sum)


def test_members_are_told_apart_by_their_labels():
    family = MetricFamily("a", "doc", ("op", "code"), Counter)
    family("x", "200").inc()
    family("x", "200").inc()
    family("x", "404").inc()
    assert {labels: each.value for labels, each in family.instruments.items()} == {("x", "200"): 2, ("x", "404"): 1}
    with pytest.raises(ValueError, match="labels"):
        family("x")


def test_one_without_labels_is_there_before_it_counts():
    assert MetricFamily("a", "doc", (), Counter).instruments[()].value == 0
