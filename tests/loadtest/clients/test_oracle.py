"""The oracle against the definitions, and what it calls wrong."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from fusednorm.reference.float8 import quantise_rows
from normload.clients import oracle
from normload.load.element_types import round_to_tensor, to_float64
from normload.load.request_cases import OPERATIONS, RequestCase
from normserve.client import DType, HostTensor
from normserve.codec.api_names import ACTIVATIONS
from normserve.memory.tensors import FLOATS

from tests.sampling import mark_rest_slow

OF_ONE_NORM = [operation for operation in OPERATIONS if operation != "layer_norm_chain"]


def case(operation, layout=None, **options):
    if operation.startswith("group_norm"):
        shape = (2, 3, 5, 6) if layout == "nhwc" else (2, 6, 3, 5)
        options = {"num_groups": 3, "layout": layout} | options
    elif layout == "nchw":
        shape, options = (2, 33, 5, 3), {"layout": layout} | options
    else:
        shape = (4, 5, 33)
    return RequestCase(operation, shape, options.pop("dtype", DType.FLOAT32), **options)


def defined(case, given):
    """y from the definitions, and h, in numpy."""
    h = given["x"]
    channel = case.channel_axis % h.ndim
    positions = tuple(axis for axis in range(1, h.ndim) if axis != channel)
    if "gate" in given:
        h = h * np.expand_dims(given["gate"], positions)
    if case.residual:
        h = h + given["residual"]
    if case.op == "group_norm":
        parts = np.split(h, case.num_groups, channel)
        axes = tuple(range(1, h.ndim))
        x_hat = np.concatenate([standardised(part, axes, 1e-5) for part in parts], channel)
    elif case.op == "layer_norm":
        x_hat = standardised(h, (channel,), 1e-5)
    else:
        x_hat = h / np.sqrt(np.mean(h**2, channel, keepdims=True) + 1e-6)
    shape = [-1 if axis == channel else 1 for axis in range(h.ndim)]
    if case.heads:
        shape = [1, *h.shape[-2:]]
    weight = given.get("weight", np.ones(1)) + case.weight_offset
    z = x_hat * weight.reshape(shape if "weight" in given else -1)
    z = z + given.get("bias", np.zeros(1)).reshape(shape if "bias" in given else -1)
    if case.adaptive:
        z = z * (1 + np.expand_dims(given["scale"], positions)) + np.expand_dims(given["shift"], positions)
    return ACTIVATION[case.activation](z), h


def standardised(h, axes, eps):
    return (h - h.mean(axes, keepdims=True)) / np.sqrt(h.var(axes, keepdims=True) + eps)


SLOPE = 0.25
ACTIVATION = {
    "none": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "leaky_relu": lambda z: np.maximum(z, 0) + SLOPE * np.minimum(z, 0),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z / 2 * (1 + np.vectorize(math.erf)(z / np.sqrt(2))),
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
}


def slope(case, given, name, direction):
    """How sum(dy * y) changes as a tensor moves in a direction, by central differences."""
    step = 1e-5
    ends = [defined(case, given | {name: given[name] + sign * step * direction})[0] for sign in (1, -1)]
    return (given["dy"] * (ends[0] - ends[1])).sum() / (2 * step)


@pytest.mark.parametrize(
    ("operation", "layout", "activation"), mark_rest_slow(product(OF_ONE_NORM, ["nchw", "nhwc"], ACTIVATIONS))
)
def test_it_agrees_with_the_definitions(operation, layout, activation):
    random = np.random.default_rng(0)
    other = {"residual": True, "residual_dtype": DType.FLOAT16}
    own = {"heads": True, "weight_offset": 1}
    gated = {"adaptive": True, "residual": True}
    for options in ({}, {"residual": True, "seed": 1}, {"affine": False}, {"adaptive": True}, gated, own, other):
        if "heads" in options and (operation.startswith("group_norm") or layout == "nchw"):
            continue
        if activation == "leaky_relu":
            options = options | {"negative_slope": SLOPE}
        asked = case(operation, layout, activation=activation, **options)
        tensors = asked.make_tensors()
        answer = oracle.compute_expected(asked, tensors)
        given = {name: to_float64(tensor) for name, tensor in tensors.items()}
        if not asked.is_backward:
            y, h = defined(asked, given)
            np.testing.assert_allclose(answer["y"].values, y, rtol=1e-9, atol=1e-9)
            assert ("residual_out" in answer) == asked.residual
            if asked.residual:
                np.testing.assert_allclose(answer["residual_out"].values, h, rtol=1e-12)
            continue
        owners = {name for name in ("x", "weight", "bias", "scale", "shift", "gate") if name in given}
        owners |= {"residual"} if asked.is_gated else set()
        own = {"dresidual"} if asked.residual_dtype and asked.op != "group_norm" else set()
        assert answer.keys() == {f"d{name}" for name in owners} | own
        if own:
            assert answer["dresidual"] is answer["dx"]
        for name in owners:
            direction = random.normal(size=given[name].shape)
            along = (answer[f"d{name}"].values.numpy() * direction).sum()
            assert along == pytest.approx(slope(asked, given, name, direction), rel=1e-5, abs=1e-5)


def right_answer(asked):
    tensors = asked.make_tensors()
    answer = {}
    for name, reference in oracle.compute_expected(asked, tensors).items():
        dtype = tensors[name.removeprefix("d")].dtype if asked.is_backward else asked.dtype
        answer[name] = round_to_tensor(reference.values.detach().numpy(), dtype)
    return tensors, answer


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("operation", OF_ONE_NORM)
def test_an_answer_that_is_only_rounded_is_right(operation, dtype):
    asked = case(operation, dtype=dtype, residual=True, adaptive=True)
    tensors, answer = right_answer(asked)
    assert oracle.find_fault(asked, tensors, answer) is None


@pytest.mark.parametrize("norms", [1, 2, 8])
def test_a_chain_is_one_norm_after_another(norms):
    asked = RequestCase("layer_norm_chain", (4, 5, 33), DType.FLOAT32, norms=norms)
    tensors = asked.make_tensors()
    assert len(tensors) == 1 + 2 * norms
    given = {name: to_float64(tensor) for name, tensor in tensors.items()}
    y = given["x"]
    for norm in range(norms):
        y = standardised(y, (-1,), 1e-5) * given[f"weight.{norm}"] + given[f"bias.{norm}"]
    np.testing.assert_allclose(oracle.compute_expected(asked, tensors)["y"].values, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cols", [1, 7, 1000])
def test_a_chain_in_float32_is_right_and_one_norm_more_is_wrong(dtype, cols):
    asked = RequestCase("layer_norm_chain", (6, cols), dtype, norms=8)
    tensors = asked.make_tensors()
    wide = {name: torch.from_numpy(to_float64(tensor)).float() for name, tensor in tensors.items()}
    y = wide["x"]
    for norm in range(8):
        parameters = wide[f"weight.{norm}"], wide[f"bias.{norm}"]
        y = torch.nn.functional.layer_norm(y, (cols,), *parameters, 1e-5)
    assert oracle.find_fault(asked, tensors, {"y": round_to_tensor(y.double().numpy(), dtype)}) is None
    more = torch.nn.functional.layer_norm(y, (cols,), *parameters, 1e-5)
    if cols > 1:
        assert "off by" in oracle.find_fault(asked, tensors, {"y": round_to_tensor(more.double().numpy(), dtype)})


@pytest.mark.parametrize("operation", ["layer_norm", "rms_norm"])
def test_float8_is_right_up_to_its_own_rounding(operation):
    asked = case(operation, out_dtype=DType.FLOAT8_E4M3FN)
    tensors = asked.make_tensors()
    exact = oracle.compute_expected(asked, tensors)["y"].values
    y, scale = quantise_rows(exact.float())

    def answer(y: torch.Tensor, scale: torch.Tensor) -> dict[str, HostTensor]:
        data = y.reshape(-1).view(torch.uint8).numpy().data
        return {
            "y": HostTensor(DType.FLOAT8_E4M3FN, tuple(y.shape), data),
            "scale": round_to_tensor(scale.double().numpy(), DType.FLOAT32),
        }

    assert oracle.find_fault(asked, tensors, answer(y, scale)) is None
    assert "off by" in oracle.find_fault(asked, tensors, answer(y, scale * 1.1))
    assert "scale of" in oracle.find_fault(asked, tensors, answer(y, scale * 1.01))
    assert "y of" in oracle.find_fault(asked, tensors, answer((y.float() * 1.3).to(y.dtype), scale))
    assert "scale" in oracle.find_fault(asked, tensors, answer(y, scale[0]))


@pytest.mark.parametrize("operation", ["layer_norm", "layer_norm/backward", "group_norm", "group_norm/backward"])
def test_any_wrong_answer_is_found(operation):
    asked = case(operation, adaptive=True)
    tensors, answer = right_answer(asked)
    for name, tensor in answer.items():
        without = {other: value for other, value in answer.items() if other != name}
        assert "expected" in oracle.find_fault(asked, tensors, without)
        values = to_float64(tensor)
        for wrong in (
            values * 1.01,
            np.where(np.arange(values.size).reshape(values.shape) == values.size - 1, np.nan, values),
        ):
            off = answer | {name: round_to_tensor(wrong, tensor.dtype)}
            assert f"{name} of {asked.shape}: off by" in oracle.find_fault(asked, tensors, off)
        for form in (
            replace(tensor, shape=(tensor.nbytes // 4,) + (1,) * 5),
            round_to_tensor(values, DType.FLOAT16),
        ):
            assert "expected float32" in oracle.find_fault(asked, tensors, answer | {name: form})


def test_names_that_a_server_makes_up_are_shown_short_and_printable():
    asked = case("layer_norm")
    given = asked.make_tensors()
    made_up = {f"\x1b{number:03}" + "n" * 1000: given["x"] for number in range(60)}
    found = oracle.find_fault(asked, given, made_up)
    assert found.startswith("expected y, got \ufffd000nnn")
    assert found.isprintable()
    assert len(found) < 400
    deep = {"y": replace(given["x"], shape=(1,) * 60)}
    assert oracle.find_fault(asked, given, deep).endswith("got float32 60 dimensions")
    assert oracle.find_fault(asked, given, {}) == "expected y, got none"
