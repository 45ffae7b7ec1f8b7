"""Operations that messages over shared memory name."""

import pytest
from normserve.errors import NotFoundError
from normserve.local.operation_planner import parse_operation


def test_an_unknown_operation_is_refused_with_those_that_there_are():
    with pytest.raises(NotFoundError, match=r"operations and passes are layer_norm forward, .* forward$"):
        parse_operation("batch_norm", "forward", "")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_of_instance_norm_the_operation_is_named_that_computes_it(direction):
    with pytest.raises(
        NotFoundError, match=r"; instance_norm is group_norm with num_groups equal to the channels$"
    ):
        parse_operation("instance_norm", direction, "num_groups=4")
