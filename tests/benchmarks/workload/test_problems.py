from dataclasses import replace

import torch

from benchmarks.workload.problems import BenchmarkProblem


def test_cells_over_the_same_tensors_share_them(problem):
    forward = problem()
    backward = BenchmarkProblem(replace(forward.cell, pass_="backward", op="rms_norm"), forward.tensors)
    assert backward.x is forward.x
    assert backward.weight is forward.weight


def test_tensors_differ_though_a_provider_seeds_torch(problem):
    it = problem()
    torch.manual_seed(1)
    x = it.x
    torch.manual_seed(1)
    assert not torch.equal(it.dy, x)


def test_another_shape_gets_tensors_of_its_own(problem):
    first = problem()
    x = first.x
    other = BenchmarkProblem(replace(first.cell, shape=(3, 128)), first.tensors)
    assert other.x.shape == (3, 128)
    assert x.shape == (6, 256)


def test_tensors_are_those_of_the_variant(problem):
    assert problem().residual is None
    assert problem(variant="residual").residual.shape == (6, 256)
    assert problem(op="rms_norm").bias is None


def test_groups_have_the_parameters_of_their_variant(problem):
    def of(variant):
        return problem("group_norm", variant=variant, shape=(2, 8, 4, 5), groups=4)

    assert of("no_affine").weight is of("no_affine").bias is None
    assert of("silu").sample_parameters == {}
    assert {name: t.shape for name, t in of("scale_shift_silu").sample_parameters.items()} == {
        "scale": (2, 8),
        "shift": (2, 8),
    }


def test_a_stream_is_as_wide_as_the_variant_says(problem):
    plain, wide = (
        problem(variant="residual", dtype="bfloat16"),
        problem(dtype="bfloat16", variant="residual_float32"),
    )
    assert (plain.residual.dtype, wide.residual.dtype) == (torch.bfloat16, torch.float32)


def test_variants_of_a_shape_share_x_but_not_parameters_of_another_shape(problem):
    one = problem()
    three = BenchmarkProblem(replace(one.cell, variant="chain"), one.tensors)
    assert three.x is one.x
    assert (one.weight.shape, three.weight.shape) == ((256,), (3, 256))
    assert problem(variant="per_head", shape=(6, 3, 64), layout="heads").bias.shape == (3, 64)


def test_channels_last_is_by_strides(problem):
    x = problem("group_norm", shape=(2, 8, 4, 5), groups=4, layout="nhwc").x
    assert x.shape == (2, 8, 4, 5)
    assert x.stride() == (160, 1, 40, 8)


def test_parameters_of_samples_of_tokens_are_chunks_of_one_tensor(problem):
    it = problem(variant="gated", shape=(2, 3, 64), layout="samples")
    parameters = it.sample_parameters
    assert {name: (t.shape, t.stride()) for name, t in parameters.items()} == dict.fromkeys(
        ("scale", "shift", "gate"), ((2, 64), (6 * 64, 1))
    )
    assert len({t.untyped_storage().data_ptr() for t in parameters.values()}) == 1
    assert len({t.data_ptr() for t in parameters.values()}) == 3


def test_the_sum_has_a_gradient_with_a_gate_alone(problem):
    gated = problem(variant="gated", shape=(2, 3, 64), layout="samples")
    assert gated.dresidual_out.shape == gated.residual.shape == (2, 3, 64)
    assert problem(variant="residual").dresidual_out is None


def test_channels_of_a_norm_over_them_may_be_last(problem):
    it = problem(shape=(2, 8, 4, 5), layout="nhwc")
    assert it.x.stride() == (160, 1, 40, 8)
    assert it.weight.shape == it.bias.shape == (8,)
