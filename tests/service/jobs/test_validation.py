"""Jobs that are made, and what is refused; the table of refusals over HTTP is in the integration tests."""

import pytest
from normserve.codec.api_names import OF_SAMPLES
from normserve.errors import InvalidParameterError, InvalidShapeError, MissingTensorError, UnexpectedTensorError
from normserve.jobs.job import LAYER_OPS, ROW_OPS, ChannelLayout, NormJob, NormSpec, Op, PassDirection
from normserve.jobs.validation import check_layer_parameters, list_accepted_tensor_names, make_validated_job
from normserve.memory.tensors import DType

from tests.service.jobs.fake_jobs import layer, tensor


def spec(op: Op = Op.LAYER_NORM, direction: PassDirection = PassDirection.FORWARD, **more: object) -> NormSpec:
    return NormSpec(op, direction, eps=1e-5, **more)


def make_job(*given: object, **options: object) -> NormJob:
    job, _ = make_validated_job(*given, **options)
    return job


def test_what_may_be_overwritten_is_said_by_who_owns_it():
    assert not make_job(spec(), {"x": tensor(2, 4)}).may_overwrite
    assert make_job(spec(), {"x": tensor(2, 4)}, may_overwrite=True).may_overwrite


def test_job_counts_its_rows():
    assert make_job(spec(), {"x": tensor(2, 3, 4)}).rows == 6
    assert make_job(spec(), {"x": tensor(4)}).rows == 1
    groups = spec(Op.GROUP_NORM, num_groups=2)
    assert make_job(groups, {"x": tensor(3, 4, 5)}).rows == 3


def test_layer_says_what_the_request_does_not():
    registered = layer(eps=0.5, activation="silu")
    made = make_job(spec(), {"x": tensor(2, 4)}, registered)
    assert (made.spec.eps, made.spec.activation, made.layer) == (0.5, "silu", registered)


@pytest.mark.parametrize(
    ("asked", "registered", "error"),
    [
        (spec(Op.RMS_NORM), layer(), InvalidParameterError),
        (spec(), layer(size=5), InvalidShapeError),
        (
            spec(Op.GROUP_NORM, layout=ChannelLayout.NHWC),
            layer(op=Op.GROUP_NORM, num_groups=2, size=5),
            InvalidShapeError,
        ),
    ],
)
def test_layer_must_fit(asked, registered, error):
    with pytest.raises(error):
        make_job(asked, {"x": tensor(3, 4)}, registered)


def test_channels_are_where_the_layout_says():
    parameters = {"x": tensor(2, 3, 8), "weight": tensor(8)}
    made = make_job(spec(Op.GROUP_NORM, num_groups=4, layout=ChannelLayout.NHWC), parameters)
    assert made.spec.num_groups == 4
    with pytest.raises(InvalidParameterError, match="divide the 3 channels"):
        make_job(spec(Op.GROUP_NORM, num_groups=4), parameters)


NHWC_HINT = "; with layout=nhwc x has 6 channels"


@pytest.mark.parametrize(
    ("tensors", "registered", "hint"),
    [
        ({"weight": tensor(6)}, None, NHWC_HINT),
        ({"bias": tensor(6)}, None, NHWC_HINT),
        ({}, layer(op=Op.GROUP_NORM, num_groups=3, size=6), NHWC_HINT),
        ({}, None, NHWC_HINT),
        ({"weight": tensor(8)}, None, ""),
        ({}, layer(op=Op.GROUP_NORM, num_groups=3, size=5), ""),
    ],
)
def test_of_groups_that_fit_the_last_axis_the_layout_is_named(tensors, registered, hint):
    groups = spec(Op.GROUP_NORM, num_groups=3, layout=ChannelLayout.NCHW)
    with pytest.raises(InvalidParameterError) as caught:
        make_job(groups, {"x": tensor(2, 8, 4, 6), **tensors}, registered)
    assert caught.value.detail == f"num_groups must divide the 8 channels, got 3{hint}"


def test_of_groups_that_fit_the_second_axis_the_layout_is_named():
    groups = spec(Op.GROUP_NORM, num_groups=3, layout=ChannelLayout.NHWC)
    with pytest.raises(InvalidParameterError, match="got 3; with layout=nchw x has 6 channels"):
        make_job(groups, {"x": tensor(2, 6, 4, 8)})


def test_heads_are_the_axis_before_the_last():
    parameters = {"weight": tensor(3, 4), "bias": tensor(3, 4)}
    assert make_job(spec(), {"x": tensor(2, 3, 4), **parameters}).unit_rows == 3
    assert make_job(spec(), {"x": tensor(2, 3, 4)}).unit_rows == 0
    assert make_job(spec(), {"x": tensor(3, 4)}, layer(heads=3)).unit_rows == 3


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"x": tensor(4), "weight": tensor(3, 4)}, r"x must be \[..., 3, N\], .* got \[4\]"),
        ({"x": tensor(4, 2, 4), "weight": tensor(3, 4)}, r"x must be \[..., 3, N\], .* got \[4, 2, 4\]"),
        ({"x": tensor(4, 3, 4), "weight": tensor(3, 5)}, r"needs weight \[3, 4\], got \[3, 5\]"),
        ({"x": tensor(4, 3, 4), "weight": tensor(3, 4), "bias": tensor(4)}, r"needs bias \[3, 4\], got \[4\]"),
        ({"x": tensor(4, 3, 4), "weight": tensor(1, 3, 4)}, r"needs weight \[4\], got \[1, 3, 4\]"),
        ({"x": tensor(65536, 1), "weight": tensor(65536, 1)}, "at most 65535 heads, got 65536"),
    ],
)
def test_parameters_of_heads_must_fit(tensors, said):
    with pytest.raises(InvalidShapeError, match=said):
        make_job(spec(), tensors)


def test_gradients_of_heads_have_a_longest_row():
    tensors = {"x": tensor(2, 8193), "dy": tensor(2, 8193), "weight": tensor(2, 8193)}
    with pytest.raises(InvalidShapeError, match="N of at most 8192, got 8193"):
        make_job(spec(direction=PassDirection.BACKWARD), tensors)
    assert make_job(spec(), {name: tensors[name] for name in ("x", "weight")}).unit_rows == 2


def test_a_layer_of_heads_takes_its_rows_alone():
    with pytest.raises(InvalidShapeError, match=r"x must be \[..., 3, N\]"):
        make_job(spec(), {"x": tensor(2, 4)}, layer(heads=3))


@pytest.mark.parametrize("tensors", [{}, {"bias": tensor(4)}])
def test_weight_offset_needs_a_weight(tensors):
    with pytest.raises(MissingTensorError, match="weight_offset needs a weight"):
        make_job(spec(weight_offset=1.0), {"x": tensor(2, 4), **tensors})
    assert make_job(spec(), {"x": tensor(2, 4)}, layer(weight_offset=1.0)).spec.weight_offset == 1.0


@pytest.mark.parametrize("direction", PassDirection)
def test_a_layer_replaces_weight_and_bias_but_not_scale_and_shift(direction):
    for op in LAYER_OPS:
        names = list_accepted_tensor_names(op, direction)
        assert {"scale", "shift"} <= set(names)
        beside_a_layer = list_accepted_tensor_names(op, direction, parameters_in_layer=True)
        assert set(names) - set(beside_a_layer) == {"weight", "bias"} - ({"bias"} if op is Op.RMS_NORM else set())


@pytest.mark.parametrize("x", [(2, 3, 8), (2, 8)])
def test_scale_and_shift_are_of_samples_and_channels(x):
    groups = spec(Op.GROUP_NORM, num_groups=4, layout=ChannelLayout.NHWC)
    tensors = {"x": tensor(*x), "scale": tensor(2, 8, dtype=DType.FLOAT16)}
    made = make_job(groups, tensors, layer(op=Op.GROUP_NORM, num_groups=2, size=8))
    assert made.tensors.keys() == {"x", "scale"}
    assert made.nbytes == tensors["x"].nbytes + 2 * 8 * 2
    for shape in ((8,), (1, 8), (2, 3), (2, 8, 1)):
        with pytest.raises(InvalidShapeError, match=r"shift must be \[2, 8\]"):
            make_job(groups, tensors | {"shift": tensor(*shape)})


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ((8,), 6),
        ((1, 8), 6),
        ((1, 1, 8), 6),
        ((2, 8), 3),
        ((2, 1, 8), 3),
        ((2, 3, 8), 1),
    ],
)
def test_scale_and_shift_of_rows_are_of_leading_axes(shape, tokens):
    tensors = {"x": tensor(2, 3, 8), "scale": tensor(*shape, dtype=DType.FLOAT16), "shift": tensor(*shape)}
    for registered in (None, layer(size=8)):
        made = make_job(spec(), tensors, registered)
        assert made.unit_rows == tokens


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"scale": tensor(3, 8)}, r"scale of x \[2, 3, 8\] must be \[8\], \[2, 8\] or \[2, 3, 8\], got \[3, 8\]"),
        ({"shift": tensor(2, 7)}, r"shift of x \[2, 3, 8\] must be .* got \[2, 7\]"),
        ({"scale": tensor(8, 2)}, r"got \[8, 2\]"),
        ({"scale": tensor(2, 3, 1, 8)}, r"got \[2, 3, 1, 8\]"),
        ({"scale": tensor(1, 1, 1, 8)}, r"got \[1, 1, 1, 8\]"),
        ({"scale": tensor()}, r"got \[\]"),
        ({"scale": tensor(2, 0, 8)}, r"got \[2, 0, 8\]"),
        ({"scale": tensor(0, 8)}, r"got \[0, 8\]"),
        ({"scale": tensor(1)}, r"got \[1\]"),
        ({"scale": tensor(2, 8), "shift": tensor(2, 3, 8)}, r"same samples of x, got \[2, 8\] and \[2, 3, 8\]"),
    ],
)
def test_scale_and_shift_of_rows_must_fit(tensors, said):
    with pytest.raises(InvalidShapeError, match=said):
        make_job(spec(), {"x": tensor(2, 3, 8), **tensors})


def test_scale_of_rows_goes_not_with_heads():
    tensors = {"x": tensor(2, 3, 4), "shift": tensor(2, 4)}
    with pytest.raises(InvalidShapeError, match="shift needs weight and bias"):
        make_job(spec(), tensors | {"weight": tensor(3, 4)})
    with pytest.raises(InvalidShapeError, match="shift needs weight and bias"):
        make_job(spec(), tensors, layer(heads=3))


def test_a_gate_needs_a_residual_and_is_shaped_as_scale():
    tensors = {"x": tensor(2, 3, 4), "gate": tensor(2, 4)}
    with pytest.raises(MissingTensorError, match="gate needs a residual"):
        make_job(spec(), tensors)
    tensors |= {"residual": tensor(2, 3, 4), "scale": tensor(2, 4)}
    assert make_job(spec(), tensors).unit_rows == 3
    with pytest.raises(InvalidShapeError, match="scale and gate must have rows for the same samples"):
        make_job(spec(), tensors | {"gate": tensor(4)})
    with pytest.raises(UnexpectedTensorError, match="got 'gate'"):
        make_job(spec(Op.GROUP_NORM, num_groups=1), tensors | {"scale": tensor(2, 3)})


@pytest.mark.parametrize(("x", "scale"), [((0, 5, 8), (0, 8)), ((3, 0, 8), (3, 8)), ((3, 0, 8), (8,))])
def test_samples_may_have_no_rows(x, scale):
    made, cost = make_validated_job(
        spec(direction=PassDirection.BACKWARD), {"x": tensor(*x), "dy": tensor(*x), "scale": tensor(*scale)}
    )
    assert (made.rows, made.unit_rows) == (0, 1)
    assert made.compute_batch_class() is None
    assert cost.result_bytes == made.tensors["scale"].nbytes


@pytest.mark.parametrize("op", ROW_OPS)
def test_rows_over_channels_are_samples(op):
    over_channels = spec(op, layout=ChannelLayout.NCHW)
    tensors = {"x": tensor(2, 4, 3, 5), "weight": tensor(4), "scale": tensor(2, 4, dtype=DType.FLOAT16)}
    made = make_job(over_channels, tensors)
    assert (made.rows, made.unit_rows) == (2, 0)
    more = make_job(over_channels, tensors | {"x": tensor(7, 4, 3, 5), "scale": tensor(7, 4, dtype=DType.FLOAT16)})
    assert made.compute_batch_class() == more.compute_batch_class()
    other = make_job(over_channels, tensors | {"x": tensor(2, 4, 5, 3)})
    assert made.compute_batch_class() != other.compute_batch_class()
    backward = spec(op, PassDirection.BACKWARD, layout=ChannelLayout.NCHW)
    x, rstd = tensor(2, 4, 3, 5), tensor(2, 3, 5)
    saved = {"rstd": rstd} if op is Op.RMS_NORM else {"mean": rstd, "rstd": rstd}
    made = make_job(backward, {"x": x, "dy": x, **saved})
    assert made.compute_batch_class() is not None
    # Their gradients are sums over positions.
    assert make_job(backward, {"x": x, "dy": x, "scale": tensor(2, 4)}).compute_batch_class() is None


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"x": tensor(4)}, r"with layout=nchw x must be \[B, C, \*spatial\] .* got \[4\]"),
        ({"x": tensor(2, 0, 3)}, r"no empty axis but B, got \[2, 0, 3\]"),
        ({"x": tensor(2, 4, 0)}, r"no empty axis but B, got \[2, 4, 0\]"),
        ({"weight": tensor(4, 5)}, "parameters of each head need layout=nhwc"),
        (
            {"weight": tensor(5)},
            r"x \[2, 4, 3, 5\] needs weight \[4\], got \[5\]; with layout=nhwc x has 5 channels$",
        ),
        ({"bias": tensor(3)}, r"needs bias \[4\], got \[3\]$"),
        ({"scale": tensor(2, 5)}, r"scale must be \[2, 4\], got \[2, 5\]"),
        ({"shift": tensor(4)}, r"shift must be \[2, 4\], got \[4\]"),
        ({"mean": tensor(2, 4, 3), "rstd": tensor(2, 4, 3)}, r"mean must be \[2, 3, 5\], got \[2, 4, 3\]"),
    ],
)
def test_tensors_over_channels_must_fit(tensors, said):
    x = tensors.get("x", tensor(2, 4, 3, 5))
    with pytest.raises(InvalidShapeError, match=said):
        make_job(spec(direction=PassDirection.BACKWARD, layout=ChannelLayout.NCHW), {"x": x, "dy": x} | tensors)


def test_a_size_of_another_axis_names_the_layout_of_it():
    x = {"x": tensor(2, 4, 3, 5)}
    over_channels = spec(layout=ChannelLayout.NCHW)
    with pytest.raises(
        InvalidShapeError, match=r"needs weight \[5\], got \[4\]; with layout=nchw x has 4 channels$"
    ):
        make_job(spec(), x | {"weight": tensor(4)})
    with pytest.raises(InvalidShapeError, match=r"is for size 4, x has 5; with layout=nchw x has 4 channels$"):
        make_job(spec(), x, layer(size=4))
    with pytest.raises(InvalidShapeError, match=r"is for size 5, x has 4; with layout=nhwc x has 5 channels$"):
        make_job(over_channels, x, layer(size=5))
    with pytest.raises(InvalidShapeError, match=r"with layout=nhwc x has 5 channels$"):
        make_job(spec(Op.GROUP_NORM, num_groups=2), x | {"weight": tensor(5)})
    with pytest.raises(InvalidShapeError, match="parameters of each head need layout=nhwc"):
        make_job(over_channels, x, layer(heads=3))
    chain = spec(Op.LAYER_NORM_CHAIN)
    with pytest.raises(InvalidShapeError, match=r"needs weight.0 \[5\], got \[4\]$"):
        make_job(chain, x | {"weight.0": tensor(4)})


@pytest.mark.parametrize("name", OF_SAMPLES)
def test_samples_of_another_layout_name_it(name):
    tensors, over_channels = {"x": tensor(2, 4, 3, 5), "residual": tensor(2, 4, 3, 5)}, ChannelLayout.NCHW
    with pytest.raises(
        InvalidShapeError, match=rf"{name} of x .*, got \[2, 4\]; with layout=nchw x has 4 channels$"
    ):
        make_job(spec(), tensors | {name: tensor(2, 4)})
    with pytest.raises(
        InvalidShapeError, match=rf"{name} must be \[2, 4\], got \[2, 5\]; with layout=nhwc x has 5"
    ):
        make_job(spec(layout=over_channels), tensors | {name: tensor(2, 5)})
    for shape in ((3, 4), (4,), (2, 4, 1), (2, 3)):
        with pytest.raises(InvalidShapeError, match=rf"{name} of x .*, got \[[0-9, ]+\]$"):
            make_job(spec(), tensors | {name: tensor(*shape)})


@pytest.mark.parametrize("op", ROW_OPS)
def test_a_gate_over_channels_is_batched_with_its_samples(op):
    over_channels = spec(op, layout=ChannelLayout.NCHW)
    tensors = {"x": tensor(2, 4, 3), "residual": tensor(2, 4, 3), "gate": tensor(2, 4)}
    made = make_job(over_channels, tensors)
    assert (made.rows, made.unit_rows) == (2, 0)
    more = make_job(over_channels, {"x": tensor(7, 4, 3), "residual": tensor(7, 4, 3), "gate": tensor(7, 4)})
    assert made.compute_batch_class() == more.compute_batch_class()
    without = make_job(over_channels, {"x": tensor(2, 4, 3), "residual": tensor(2, 4, 3)})
    assert made.compute_batch_class() != without.compute_batch_class()
    with pytest.raises(InvalidShapeError, match=r"gate must be \[2, 4\], got \[2, 3\]"):
        make_job(over_channels, tensors | {"gate": tensor(2, 3)})
    with pytest.raises(MissingTensorError, match="gate needs a residual"):
        make_job(over_channels, {"x": tensor(2, 4, 3), "gate": tensor(2, 4)})
    backward = spec(op, PassDirection.BACKWARD, layout=ChannelLayout.NCHW)
    made, cost = make_validated_job(backward, tensors | {"dy": tensor(2, 4, 3)})
    assert made.compute_batch_class() is None
    # dx, dresidual and dgate.
    assert cost.result_bytes == sum(each.nbytes for each in tensors.values())


def test_float8_needs_channels_that_are_last():
    with pytest.raises(InvalidParameterError, match="float8_e4m3fn needs layout=nhwc"):
        make_job(spec(layout=ChannelLayout.NCHW, out_dtype=DType.FLOAT8_E4M3FN), {"x": tensor(2, 4, 3)})


def test_long_tensor_names_are_cut():
    with pytest.raises(UnexpectedTensorError) as caught:
        make_job(spec(), {"x": tensor(2, 4), "y" * 1000: tensor(1)})
    assert len(caught.value.detail) < 200


def test_parameters_of_a_layer():
    weight, bias = tensor(4), tensor(4)
    assert check_layer_parameters(Op.LAYER_NORM, {"weight": weight, "bias": bias}) == (weight, bias)
    assert check_layer_parameters(Op.RMS_NORM, {"weight": weight}) == (weight, None)
