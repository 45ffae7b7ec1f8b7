"""What a query means: each value at the bounds of what it may be, defaults, and what goes together."""

import pytest
from normserve.codec.api_names import ACTIVATIONS
from normserve.errors import InvalidParameterError
from normserve.jobs.job import ROW_OPS, ChannelLayout, Op, PassDirection
from normserve.memory.tensors import FLOATS, DType
from normserve.requests.request_parameters import (
    LAYER_PARAMETERS,
    list_operation_parameters,
    make_openapi_parameters,
    make_spec,
    parse_query,
)

GROUP_FORWARD = list_operation_parameters(Op.GROUP_NORM, PassDirection.FORWARD)
SMALLEST_FLOAT32 = 2.0**-149
LARGEST_FLOAT32 = 3.4028234663852886e38


def parsed(query: str, parameters=GROUP_FORWARD) -> dict:
    return parse_query(query.encode(), parameters)


@pytest.mark.parametrize(
    ("query", "value"),
    [
        ("eps=1e-5", 1e-5),
        (f"eps={SMALLEST_FLOAT32}", SMALLEST_FLOAT32),
        ("eps=3.4028234663852886e38", LARGEST_FLOAT32),
        ("eps=" + "0" * 63 + "1", 1.0),
        ("num_groups=1", 1),
        ("num_groups=32", 32),
        ("num_groups=" + "0" * 18 + "7", 7),
        ("layout=nchw", ChannelLayout.NCHW),
        ("layout=nhwc", ChannelLayout.NHWC),
        *((f"activation={name}", name) for name in ACTIVATIONS),
        ("dropout=0", 0.0),
        ("dropout=0.999999", 0.999999),
        ("seed=0", 0),
        ("seed=-9223372036854775808", -(2**63)),
        ("seed=9223372036854775807", 2**63 - 1),
        *((f"out_dtype={dtype.value}", dtype) for dtype in FLOATS),
        ("stats=true", True),
        ("stats=1", True),
        ("stats=false", False),
        ("stats=0", False),
        ("layer=a", "a"),
        ("layer=" + "x" * 128, "x" * 128),
        ("timeout_ms=0.001", 0.001),
        ("timeout_ms=86400000", 86_400_000.0),
    ],
)
def test_values_up_to_their_bounds_are_read(query, value):
    name = query.partition("=")[0]
    read = parsed(query)[name]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "query",
    [
        *(
            "eps=0",
            "eps=-0.0",
            f"eps={SMALLEST_FLOAT32 / 4}",
            "eps=3.5e38",
            "eps=" + "0" * 64 + "1",
        ),
        *("num_groups=0", "num_groups=-1", "num_groups=1.0", "num_groups=" + "1" * 65),
        *("dropout=1", "dropout=1.0", "dropout=-0.000001", "dropout=1e400"),
        *("seed=-9223372036854775809", "seed=9223372036854775808", "seed=0.0"),
        *("stats=True", "stats=2", "stats=yes"),
        *("layer=", "layer=" + "x" * 129, "layer=a/b"),
        *("timeout_ms=0", "timeout_ms=86400001", "timeout_ms=86400000.1"),
    ],
)
def test_values_beyond_their_bounds_are_refused_by_name(query):
    with pytest.raises(InvalidParameterError, match=query.partition("=")[0] + " must be"):
        parsed(query)


def test_as_many_fields_as_anybody_could_need_are_read_and_no_more():
    many = "&".join(f"eps{index}=1" for index in range(64))
    with pytest.raises(InvalidParameterError, match="is not a parameter"):
        parsed(many)
    with pytest.raises(InvalidParameterError, match="at most 64 name=value pairs"):
        parsed(many + "&eps64=1")


def test_a_name_that_comes_twice_is_refused_though_the_values_agree():
    with pytest.raises(InvalidParameterError, match="eps must be given once"):
        parsed("eps=1e-5&eps=1e-5")


def test_long_values_are_not_repeated_whole():
    with pytest.raises(InvalidParameterError) as caught:
        parsed("activation=" + "x" * 5000)
    assert len(caught.value.detail) < 200


def test_an_empty_query_says_nothing():
    assert parsed("") == {}


BASE = {"eps", "layout", "activation", "negative_slope", "dropout", "seed", "layer", "timeout_ms"}
ROWS = {"weight_offset"}
FORWARD = {"out_dtype", "stats"}
GROUPS = {"num_groups"}


@pytest.mark.parametrize(
    ("op", "direction", "names"),
    [
        (Op.LAYER_NORM, PassDirection.FORWARD, BASE | ROWS | FORWARD),
        (Op.LAYER_NORM, PassDirection.BACKWARD, BASE | ROWS),
        (Op.RMS_NORM, PassDirection.FORWARD, BASE | ROWS | FORWARD),
        (Op.RMS_NORM, PassDirection.BACKWARD, BASE | ROWS),
        (Op.GROUP_NORM, PassDirection.FORWARD, BASE | FORWARD | GROUPS),
        (Op.GROUP_NORM, PassDirection.BACKWARD, BASE | GROUPS),
    ],
)
def test_each_operation_takes_its_own_parameters(op, direction, names):
    parameters = list_operation_parameters(op, direction)
    assert set(parameters) == names
    assert {described["name"] for described in make_openapi_parameters(parameters)} == names
    assert all(
        described["in"] == "query" and not described["required"]
        for described in make_openapi_parameters(parameters)
    )


def test_a_layer_says_what_an_operation_does_not():
    fixed = {"eps", "num_groups", "weight_offset", "activation", "negative_slope"}
    assert set(LAYER_PARAMETERS) == {"op", *fixed}


@pytest.mark.parametrize(("op", "eps"), [(Op.LAYER_NORM, 1e-5), (Op.RMS_NORM, 1e-6), (Op.GROUP_NORM, 1e-5)])
def test_defaults_are_those_of_the_contract(op, eps):
    values = {"num_groups": 2} if op is Op.GROUP_NORM else {}
    spec = make_spec(op, PassDirection.FORWARD, values)
    assert spec.eps == eps
    assert (spec.op, spec.direction) == (op, PassDirection.FORWARD)
    assert spec.num_groups == values.get("num_groups", 0)
    assert spec.layout is (ChannelLayout.NCHW if op is Op.GROUP_NORM else None)
    assert (spec.activation, spec.dropout, spec.seed) == ("none", 0.0, None)
    assert (spec.out_dtype, spec.stats) == (None, False)


@pytest.mark.parametrize("op", ROW_OPS)
def test_channels_of_rows_are_last_unless_the_layout_says_otherwise(op):
    parameters = list_operation_parameters(op, PassDirection.FORWARD)
    for query, layout in (("", None), ("layout=nhwc", None), ("layout=nchw", ChannelLayout.NCHW)):
        spec = make_spec(op, PassDirection.FORWARD, parsed(query, parameters))
        assert spec.layout is layout
    with pytest.raises(InvalidParameterError, match="layout must be one of nchw, nhwc, got 'nlc'"):
        parsed("layout=nlc", parameters)


def test_what_is_said_is_what_is_asked():
    query = "eps=0.5&num_groups=4&layout=nhwc&activation=silu&dropout=0.25&seed=7&out_dtype=float16&stats=true"
    spec = make_spec(Op.GROUP_NORM, PassDirection.FORWARD, parsed(query))
    assert (spec.eps, spec.num_groups, spec.layout, spec.activation) == (0.5, 4, ChannelLayout.NHWC, "silu")
    assert (spec.dropout, spec.seed, spec.out_dtype, spec.stats) == (0.25, 7, DType.FLOAT16, True)


def test_a_slope_belongs_to_leaky_relu():
    query = "activation=leaky_relu&negative_slope=-0.25"
    assert make_spec(Op.RMS_NORM, PassDirection.FORWARD, parsed(query)).negative_slope == -0.25
    for query in ("negative_slope=0.25", "negative_slope=0.25&activation=relu"):
        with pytest.raises(InvalidParameterError, match="negative_slope needs activation leaky_relu, got"):
            make_spec(Op.RMS_NORM, PassDirection.FORWARD, parsed(query))
    assert make_spec(Op.RMS_NORM, PassDirection.FORWARD, parsed("negative_slope=0.01")).activation == "none"


@pytest.mark.parametrize("text", ["1e39", "-1e39", "nan", "inf", "", "x"])
def test_a_slope_is_finite_as_a_float32(text):
    with pytest.raises(InvalidParameterError, match="negative_slope must be"):
        parsed(f"negative_slope={text}")


@pytest.mark.parametrize(
    ("op", "values", "words"),
    [
        (Op.LAYER_NORM, {"dropout": 0.5}, "seed must be given"),
        (Op.GROUP_NORM, {}, "num_groups must be given"),
        (Op.LAYER_NORM, {"layer": "a", "eps": 1e-5}, "eps belongs to the layer"),
        (Op.GROUP_NORM, {"layer": "a", "num_groups": 2}, "num_groups belongs to the layer"),
        (Op.LAYER_NORM, {"layer": "a", "activation": "none"}, "activation belongs to the layer"),
    ],
)
def test_what_does_not_go_together_is_refused(op, values, words):
    with pytest.raises(InvalidParameterError, match=words):
        make_spec(op, PassDirection.FORWARD, values)


def test_with_a_layer_group_norm_needs_no_groups():
    assert make_spec(Op.GROUP_NORM, PassDirection.FORWARD, {"layer": "a"}).num_groups == 0


@pytest.mark.parametrize(
    ("name", "closest"), [("epsilon", "eps"), ("activaton", "activation"), ("groups", "num_groups")]
)
def test_an_unknown_name_is_refused_with_the_closest(name, closest):
    with pytest.raises(InvalidParameterError, match=f"'{name}' is not a parameter.*'{closest}'"):
        parsed(f"{name}=1")


@pytest.mark.parametrize("name", ["priority", "x", ""])
def test_an_unknown_name_like_no_other_is_refused_with_those_that_there_are(name):
    with pytest.raises(InvalidParameterError, match="expected eps, num_groups, layout") as refused:
        parsed(f"{name}=1")
    assert "closest" not in str(refused.value)


@pytest.mark.parametrize("query", [b"eps=\xff", b"eps=%ff", b"eps"])
def test_what_is_no_text_is_refused(query):
    with pytest.raises(InvalidParameterError):
        parse_query(query, GROUP_FORWARD)
