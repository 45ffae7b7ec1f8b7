"""Which cases of a table `make test` runs."""

from itertools import combinations, product

import pytest

from tests.sampling import mark_rest_slow

AXES = ("abcde", range(4), (None, 0.5), ((1, 2), (3, 4), (5, 6)))


def split(table):
    """The cases that `make test` runs, and those that it leaves out."""
    run = [case for case in table if isinstance(case, tuple) and not hasattr(case, "marks")]
    return run, [case for case in table if hasattr(case, "marks")]


@pytest.mark.parametrize("together", [1, 2])
def test_no_case_is_lost_and_the_sample_has_every_combination_of_so_many_values(together):
    cases = list(product(*AXES))
    run, left_out = split(mark_rest_slow(cases, together))
    assert sorted(map(repr, [*run, *(tuple(each.values) for each in left_out)])) == sorted(map(repr, cases))
    assert {mark.name for each in left_out for mark in each.marks} == {"slow"}
    for places in combinations(range(len(AXES)), together):
        wanted = set(product(*(AXES[place] for place in places)))
        assert {tuple(case[place] for place in places) for case in run} == wanted
    assert len(run) < len(cases) / 3


def test_a_table_of_one_case_is_run():
    assert mark_rest_slow([("a", 1)]) == [("a", 1)]
