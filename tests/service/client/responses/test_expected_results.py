"""An answer is what was asked for, tensor by tensor, or an error."""

import numpy as np
import pytest
from normserve.client import UnexpectedAnswerError

from tests.service.client.harness.fake_server import FakeServer, tensors_answer

X = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
ROWS = np.zeros((2, 4), np.float32)
POSITIONS = np.zeros((2, 3), np.float32)
W = np.ones(3, np.float16)
H = np.ones((4, 3), np.float16)
C = np.ones(4, np.float16)
SCALAR = np.zeros((), np.float32)
SAMPLES = np.ones((2, 4), np.float16)


def groups(count, samples=2):
    return np.zeros((samples, count), np.float32)


#: An operation, what it is asked, a right answer, and what makes it a wrong one: a name with another array or None.
CASES = [
    ("layer_norm", {}, {"y": X}),
    ("layer_norm", {"out_dtype": "float16"}, {"y": X.astype(np.float16)}),
    ("layer_norm", {"residual": X}, {"y": X, "residual_out": X}),
    ("layer_norm", {"stats": True}, {"y": X, "mean": ROWS, "rstd": ROWS}),
    (
        "layer_norm",
        {"stats": True, "layer": "a", "residual": X},
        {"y": X, "residual_out": X, "mean": ROWS, "rstd": ROWS},
    ),
    ("layer_norm", {"x": X[:0]}, {"y": X[:0]}),
    ("rms_norm", {"stats": True}, {"y": X, "rstd": ROWS}),
    ("group_norm", {"num_groups": 2, "stats": True}, {"y": X, "mean": groups(2), "rstd": groups(2)}),
    ("group_norm", {"layer": "a", "stats": True}, {"y": X, "mean": groups(4), "rstd": groups(4)}),
    ("group_norm", {"layer": "a", "stats": True}, {"y": X, "mean": groups(1), "rstd": groups(1)}),
    ("group_norm", {"layer": "a", "layout": "nhwc", "stats": True}, {"y": X, "mean": groups(3), "rstd": groups(3)}),
    ("layer_norm", {"layout": "nchw", "stats": True}, {"y": X, "mean": POSITIONS, "rstd": POSITIONS}),
    ("rms_norm", {"layout": "nchw", "stats": True}, {"y": X, "rstd": POSITIONS}),
    ("rms_norm", {"layout": "nhwc", "stats": True}, {"y": X, "rstd": ROWS}),
    ("layer_norm_backward", {"dy": X}, {"dx": X}),
    ("layer_norm_backward", {"dy": X, "weight": W, "bias": W}, {"dx": X, "dweight": W, "dbias": W}),
    ("layer_norm_backward", {"dy": X, "layer": "a"}, {"dx": X, "dweight": W.astype(np.float32)}),
    ("layer_norm_backward", {"dy": X, "layer": "a"}, {"dx": X, "dweight": W, "dbias": W.astype(np.float32)}),
    ("layer_norm_backward", {"dy": X, "weight": H, "bias": H}, {"dx": X, "dweight": H, "dbias": H}),
    ("layer_norm_backward", {"dy": X, "layer": "a"}, {"dx": X, "dweight": H}),
    ("layer_norm_backward", {"dy": X, "layer": "a"}, {"dx": X, "dweight": H, "dbias": H}),
    ("layer_norm_backward", {"x": X[0], "dy": X[0], "layer": "a"}, {"dx": X[0], "dweight": H, "dbias": H}),
    ("layer_norm_backward", {"dy": X, "layer": "a", "layout": "nchw"}, {"dx": X, "dweight": C, "dbias": C}),
    (
        "rms_norm_backward",
        {"dy": X, "layer": "a", "layout": "nchw", "scale": SAMPLES},
        {"dx": X, "dweight": C, "dscale": SAMPLES},
    ),
    (
        "layer_norm_backward",
        {"dy": X, "layout": "nchw", "residual": X, "gate": SAMPLES},
        {"dx": X, "dresidual": X, "dgate": SAMPLES},
    ),
    ("rms_norm_backward", {"dy": X, "layer": "a"}, {"dx": X, "dweight": H}),
    ("rms_norm_backward", {"dy": X, "weight": W}, {"dx": X, "dweight": W}),
    ("rms_norm_backward", {"dy": X, "layer": "a"}, {"dx": X, "dweight": W}),
    ("group_norm_backward", {"dy": X, "layer": "a"}, {"dx": X, "dweight": C, "dbias": C}),
    ("group_norm_backward", {"dy": X, "layer": "a", "layout": "nhwc"}, {"dx": X, "dweight": W}),
    (
        "group_norm_backward",
        {"dy": X, "num_groups": 2, "weight": C, "scale": SAMPLES, "shift": SAMPLES},
        {"dx": X, "dweight": C, "dscale": SAMPLES, "dshift": SAMPLES},
    ),
]


def outcome(connect, operation, arguments, tensors):
    return getattr(connect(FakeServer(tensors_answer(**tensors))), operation)(**{"x": X} | arguments)


@pytest.mark.parametrize(("operation", "arguments", "right"), CASES)
def test_what_was_asked_for_is_returned(connect, operation, arguments, right):
    result = outcome(connect, operation, arguments, right)
    for name, expected in right.items():
        np.testing.assert_array_equal(getattr(result, name), expected)


def is_optional(name, arguments):
    return name == "dbias" and "layer" in arguments


@pytest.mark.parametrize(("operation", "arguments", "right"), CASES)
def test_anything_else_is_an_error(connect, operation, arguments, right):
    wrong = [right | {"extra": X}, right | {"dx" if "y" in right else "y": X}]
    if not operation.startswith("layer"):
        wrong.append(right | {"residual_out": X})
    for name, tensor in right.items():
        others = {key: value for key, value in right.items() if key != name}
        if not is_optional(name, arguments):
            wrong.append(others)
        wrong += [others | {name: np.zeros((*tensor.shape[:-1], size), tensor.dtype)} for size in (0, 5, 7)]
        wrong += [others | {name: tensor[None]}, others | {name: np.zeros((), tensor.dtype)}]
        if "layer" not in arguments or not name.startswith("d") or name == "dx":
            other = np.float16 if tensor.dtype == np.float32 else np.float32
            wrong.append(others | {name: tensor.astype(other)})
    for tensors in wrong:
        with pytest.raises(UnexpectedAnswerError):
            outcome(connect, operation, arguments, tensors)


@pytest.mark.parametrize(
    ("mean", "rstd"), [(groups(3), groups(3)), (groups(8), groups(8)), (groups(2), groups(4)), (groups(2, 3),) * 2]
)
def test_groups_of_a_registered_layer_come_out_even(connect, mean, rstd):
    with pytest.raises(UnexpectedAnswerError):
        outcome(connect, "group_norm", {"layer": "a", "stats": True}, {"y": X, "mean": mean, "rstd": rstd})


@pytest.mark.parametrize(
    ("operation", "arguments", "tensors"),
    [
        ("layer_norm", {}, {"dweight": H, "dbias": W}),
        ("layer_norm", {}, {"dweight": W, "dbias": H}),
        ("layer_norm", {}, {"dweight": H[:3]}),
        ("layer_norm", {}, {"dweight": H[:, :2]}),
        ("layer_norm", {}, {"dweight": H[:0]}),
        ("layer_norm", {"x": X[:0, :0], "dy": X[:0, :0]}, {"dweight": H[:0]}),
        ("layer_norm", {"x": X[0, 0], "dy": X[0, 0]}, {"dweight": W[None]}),
        ("group_norm", {}, {"dweight": H}),
        ("group_norm", {"layout": "nhwc"}, {"dweight": H}),
        ("layer_norm", {"layout": "nchw"}, {"dweight": H}),
    ],
)
def test_parameters_of_each_head_are_of_rows_and_as_many_as_x_has(connect, operation, arguments, tensors):
    given = {"x": X, "dy": X} | arguments
    with pytest.raises(UnexpectedAnswerError):
        outcome(connect, f"{operation}_backward", given | {"layer": "a"}, {"dx": given["x"]} | tensors)


def test_the_message_names_both_shapes_that_a_layer_may_have(connect):
    with pytest.raises(UnexpectedAnswerError, match=r"dweight must be \[3\] or \[4, 3\], got \[5\]"):
        outcome(connect, "rms_norm_backward", {"dy": X, "layer": "a"}, {"dx": X, "dweight": np.ones(5, np.float32)})


def test_rms_norm_has_no_mean_and_no_bias(connect):
    for operation, arguments, tensors in (
        ("rms_norm", {"stats": True}, {"y": X, "mean": ROWS, "rstd": ROWS}),
        ("rms_norm_backward", {"dy": X, "layer": "a"}, {"dx": X, "dweight": W, "dbias": W}),
    ):
        with pytest.raises(UnexpectedAnswerError, match="no more than"):
            outcome(connect, operation, arguments, tensors)


def test_the_message_says_what_was_expected_and_what_came(connect):
    for tensors, said in (
        ({"y": X[:1]}, r"the answer's y must be \[2, 4, 3\], got \[1, 4, 3\]"),
        ({"y": X.astype(np.float16)}, "the answer's y must be float32, got float16"),
        ({"dx": X}, "the answer must hold y, it does not"),
        ({"y": X, "password": X}, "the answer must hold no more than y, it does"),
        ({"y": X.reshape((1,) * 50 + (24,))}, "got 51 dimensions"),
    ):
        with pytest.raises(UnexpectedAnswerError, match=said):
            outcome(connect, "layer_norm", {}, tensors)


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("layer_norm", {"x": SCALAR, "stats": True}),
        ("layer_norm", {"x": SCALAR, "stats": True, "layout": "nchw"}),
        ("layer_norm_backward", {"x": X[0, 0], "dy": X, "layer": "a", "layout": "nchw"}),
        ("rms_norm_backward", {"x": SCALAR, "dy": X, "layer": "a"}),
        ("group_norm", {"x": SCALAR, "stats": True}),
        ("group_norm", {"x": X[0, 0], "stats": True, "layer": "a"}),
        ("group_norm_backward", {"x": X[0, 0], "dy": X, "layer": "a"}),
        ("group_norm", {"out_dtype": "float64", "num_groups": "many", "stats": True}),
    ],
)
def test_what_means_nothing_is_the_servers_to_refuse(connect, operation, arguments):
    server = FakeServer()
    server.answers = [UnexpectedAnswerError("it was asked")]
    with pytest.raises(UnexpectedAnswerError, match="it was asked"):
        getattr(connect(server), operation)(**{"x": X} | arguments)
