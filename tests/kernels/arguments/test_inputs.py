"""The order and the roles of a call's tensors."""

from fusednorm.arguments.inputs import ROLES, BackwardInputs, NormInputs, ShapeRole, group_names_by_role
from fusednorm.results import Backward


def test_gradients_have_the_order_of_inputs():
    assert Backward._fields == tuple(f"d{name}" for name in NormInputs._fields)


def test_backward_inputs_start_with_those_of_the_forward_pass():
    inputs = BackwardInputs(*range(11))
    assert inputs.forward_inputs == NormInputs(*range(7))


def test_each_tensor_has_a_role():
    assert set(BackwardInputs._fields) == ROLES.keys()
    assert group_names_by_role(BackwardInputs._fields)[ShapeRole.LIKE_X] == ("x", "residual", "dy", "dresidual_out")
