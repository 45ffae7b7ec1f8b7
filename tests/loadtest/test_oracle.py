"""The oracle against torch's autograd, and what it calls wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from normload import oracle
from normload.elements import narrow, widen
from normload.cases import OPERATIONS, Case
from normserve.client import DType

ACTIVATIONS = {"none": lambda z: z, "silu": F.silu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}


def case(operation, layout="nchw", **options):
    if operation.startswith("group_norm"):
        shape = (2, 6, 3, 5) if layout == "nchw" else (2, 3, 5, 6)
        options = {"num_groups": 3, "layout": layout} | options
    else:
        shape = (4, 5, 33)
    return Case(operation, shape, options.pop("dtype", DType.FLOAT32), **options)


def torch_answer(case, tensors):
    leaves = {name: torch.from_numpy(widen(tensor)).requires_grad_() for name, tensor in tensors.items()}
    h = leaves["x"] + leaves["residual"] if case.residual else leaves["x"]
    weight, bias = leaves.get("weight"), leaves.get("bias")
    if case.op == "layer_norm":
        z = F.layer_norm(h, h.shape[-1:], weight, bias, 1e-5)
    elif case.op == "rms_norm":
        z = F.rms_norm(h, h.shape[-1:], weight, 1e-6)
    elif case.layout == "nchw":
        z = F.group_norm(h, case.num_groups, weight, bias, 1e-5)
    else:
        z = F.group_norm(h.movedim(-1, 1), case.num_groups, weight, bias, 1e-5).movedim(1, -1)
    if case.adaptive:
        of_positions = (..., None, None) if case.layout == "nchw" else (slice(None), None, None)
        z = z * (1 + leaves["scale"][of_positions]) + leaves["shift"][of_positions]
    y = ACTIVATIONS[case.activation](z)
    if not case.is_backward:
        answer = {"y": y.detach()}
        return answer | {"residual_out": h.detach()} if case.residual else answer
    y.backward(leaves["dy"].detach())
    owners = ("x", "weight", "bias", "scale", "shift")
    return {f"d{name}": leaves[name].grad for name in owners if name in leaves}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_it_agrees_with_torch(operation, layout, activation):
    for options in ({}, {"residual": True, "seed": 1}, {"affine": False}, {"adaptive": True}):
        if "adaptive" in options and not operation.startswith("group_norm"):
            continue
        asked = case(operation, layout, activation=activation, **options)
        tensors = asked.tensors()
        answer, expected = oracle.expected(asked, tensors), torch_answer(asked, tensors)
        assert answer.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(answer[name].values, values.numpy(), rtol=1e-9, atol=1e-9)


def right_answer(asked):
    tensors = asked.tensors()
    dtype = {
        name: tensors[name[1:]].dtype if asked.is_backward else asked.dtype for name in torch_answer(asked, tensors)
    }
    expected = oracle.expected(asked, tensors)
    return tensors, {name: narrow(reference.values, dtype[name]) for name, reference in expected.items()}


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_answer_that_is_only_rounded_is_right(operation, dtype):
    asked = case(operation, dtype=dtype, residual=True, adaptive=operation.startswith("group_norm"))
    tensors, answer = right_answer(asked)
    assert oracle.fault(asked, tensors, answer) is None


@pytest.mark.parametrize("operation", ["layer_norm", "layer_norm/backward", "group_norm", "group_norm/backward"])
def test_any_wrong_answer_is_found(operation):
    asked = case(operation, adaptive=operation.startswith("group_norm"))
    tensors, answer = right_answer(asked)
    for name, tensor in answer.items():
        without = {other: value for other, value in answer.items() if other != name}
        assert "expected" in oracle.fault(asked, tensors, without)
        values = widen(tensor)
        for wrong in (
            values * 1.01,
            np.where(np.arange(values.size).reshape(values.shape) == values.size - 1, np.nan, values),
        ):
            off = answer | {name: narrow(wrong, tensor.dtype)}
            assert f"{name} of {asked.shape}: off by" in oracle.fault(asked, tensors, off)
        for form in (replace(tensor, shape=(tensor.nbytes // 4,) + (1,) * 5), narrow(values, DType.FLOAT16)):
            assert "expected float32" in oracle.fault(asked, tensors, answer | {name: form})
