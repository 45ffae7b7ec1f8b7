"""The fewest bytes of a pass: the old names of the functions."""

import pytest
from fusednorm import traffic


@pytest.mark.parametrize(("name", "expected"), [("forward_bytes", 80), ("backward_bytes", 120)])
def test_old_names_warn(name, expected):
    with pytest.warns(DeprecationWarning, match=f"compute_{name}.*0.3.0") as caught:
        compute = getattr(traffic, name)
    assert caught[0].filename == __file__
    assert compute(10, 4, 4) == expected


def test_names_that_never_were_are_refused(recwarn):
    with pytest.raises(AttributeError, match="has no attribute 'sideways_bytes'"):
        traffic.sideways_bytes  # noqa: B018
    assert not recwarn.list
