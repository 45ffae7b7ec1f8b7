from dataclasses import replace

from benchmarks.problem import Problem


def test_cells_over_the_same_tensors_share_them(problem):
    forward = problem()
    backward = Problem(replace(forward.cell, pass_="backward", op="rms_norm"), forward.tensors)
    assert backward.x is forward.x
    assert backward.weight is forward.weight


def test_another_shape_gets_tensors_of_its_own(problem):
    first = problem()
    x = first.x
    other = Problem(replace(first.cell, shape=(3, 128)), first.tensors)
    assert other.x.shape == (3, 128)
    assert x.shape == (6, 256)


def test_tensors_are_those_of_the_variant(problem):
    assert problem().residual is None
    assert problem(variant="residual").residual.shape == (6, 256)
    assert problem(op="rms_norm").bias is None


def test_channels_last_is_by_strides(problem):
    x = problem("group_norm", shape=(2, 8, 4, 5), groups=4, layout="nhwc").x
    assert x.shape == (2, 8, 4, 5)
    assert x.stride() == (160, 1, 40, 8)
