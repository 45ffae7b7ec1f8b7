"""Clients that share memory with a real server: the same answers to the bit as over HTTP, and the same errors."""

import asyncio

import numpy as np
import pytest
import torch
from normserve.client import AsyncClient, Client, InvalidRequestError, UnknownLayerError
from normserve.codec.api_names import ACTIVATIONS

from tests.integration.clients.local.results import assert_same, random

SHAPES = {"layer_norm": (6, 5, 48), "rms_norm": (30, 48), "group_norm": (3, 12, 5, 4)}


def arguments(op, kind=np.asarray, dtype=torch.float32):
    shape = SHAPES[op]
    size = shape[1] if op == "group_norm" else shape[-1]
    affine = {"weight": kind(random(size, seed=3, dtype=dtype)), "bias": kind(random(size, seed=4, dtype=dtype))}
    if op == "rms_norm":
        del affine["bias"]
    more = {"num_groups": 3} if op == "group_norm" else {}
    return kind(random(*shape, dtype=dtype)), affine, more


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_both_passes_have_the_same_bits_as_over_http(http, local, op, activation):
    x, affine, more = arguments(op)
    more |= {"residual": np.asarray(random(*x.shape, seed=1)), "activation": activation, "eps": 3e-4}
    forward = [getattr(each, op)(x, **affine, **more, stats=True) for each in (local, http)]
    assert_same(*forward)
    saved = {name: getattr(forward[0], name) for name in ("mean", "rstd")}
    if saved["mean"] is None:
        del saved["mean"]
    dy, arrived = (np.asarray(random(*x.shape, seed=seed)) for seed in (6, 7))
    backward = f"{op}_backward"
    more["dresidual_out"] = arrived
    assert_same(*[getattr(each, backward)(dy, x, **affine, **more, **saved) for each in (local, http)])


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_element_type_of_torch(http, local, op, dtype):
    x, affine, more = arguments(op, torch.as_tensor, dtype)
    more |= {"dropout": 0.3, "seed": -5, "out_dtype": torch.float16}
    assert_same(*[getattr(each, op)(x, **affine, **more) for each in (local, http)])


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_a_chain(http, local, kind):
    x, weight = kind(random(6, 5, 48)), kind(random(48, seed=3))
    for _ in range(3):
        assert_same(*[each.layer_norm_chain(x, [weight, None, weight], [weight]) for each in (local, http)])


def test_a_chain_that_comes_again_in_shared_memory_reads_what_lies_there_then(http, local):
    x, *weights = (local.empty(shape) for shape in ((6, 48), (48,), (48,)))
    for seed in range(4):
        for number, tensor in enumerate((x, *weights)):
            tensor[:] = random(*tensor.shape, seed=10 * seed + number).numpy()
        assert_same(*[each.layer_norm_chain(x, weights) for each in (local, http)])
        swapped = local.layer_norm_chain(x, [weights[1], weights[0]]).y
        assert np.array_equal(swapped, http.layer_norm_chain(x, weights[::-1]).y)
        assert not np.array_equal(swapped, local.layer_norm_chain(x, weights).y)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_a_residual_of_its_own_type_and_parameters_of_each_head(http, local, op):
    x = random(4, 6, 48, dtype=torch.bfloat16)
    more = {"weight": random(6, 48, seed=3), "residual": random(4, 6, 48, seed=1), "weight_offset": 1}
    assert_same(*[getattr(each, op)(x, **more) for each in (local, http)])
    assert_same(*[getattr(each, f"{op}_backward")(x, x, **more) for each in (local, http)])


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_float8_with_its_scale(http, local, op):
    x = random(4, 6, 48, dtype=torch.bfloat16)
    for _ in range(2):
        results = [getattr(each, op)(x, residual=x, out_dtype="float8_e4m3fn") for each in (local, http)]
        for name in ("y", "scale", "residual_out"):
            first, second = (getattr(each, name) for each in results)
            assert first.dtype == second.dtype
            assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def test_group_norm_in_channels_last_with_scale_and_shift(http, local):
    x, affine, more = arguments("group_norm")
    x = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    more |= {"layout": "nhwc"} | {name: np.asarray(random(3, 12, seed=9)) for name in ("scale", "shift")}
    assert_same(*[each.group_norm(x, **affine, **more) for each in (local, http)])
    assert_same(*[each.group_norm_backward(x, x, **affine, **more) for each in (local, http)])


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norms_over_channels(http, local, op, kind):
    shape = SHAPES["group_norm"]
    x, dy, residual = (kind(random(*shape, seed=seed)) for seed in (1, 2, 3))
    more = {name: kind(random(3, 12, seed=9)) for name in ("scale", "shift")}
    more |= {"weight": kind(random(12, seed=4)), "residual": residual, "layout": "nchw"}
    # The memory of the first call is used by the next ones, which the server prepares.
    for _ in range(3):
        assert_same(*[getattr(each, op)(x, **more, stats=True) for each in (local, http)])
        assert_same(*[getattr(each, f"{op}_backward")(dy, x, **more) for each in (local, http)])
    assert_same(*[getattr(each, op)(x[:0], layout="nchw", stats=True) for each in (local, http)])
    several = [x[:1], x[1:]]
    together = [getattr(each, op)(several, layout="nchw", stats=True) for each in (local, http)]
    for name in ("y", "rstd"):
        for one, other in zip(*[getattr(each, name) for each in together], strict=True):
            np.testing.assert_array_equal(one, other)


def test_norms_over_channels_read_what_lies_in_shared_memory_then(http, local):
    x, weight = local.empty((2, 12, 700)), local.empty((12,))
    for seed in range(4):
        x[:], weight[:] = random(2, 12, 700, seed=seed).numpy(), random(12, seed=seed).numpy()
        assert_same(*[each.layer_norm(x, weight, layout="nchw") for each in (local, http)])
        assert_same(*[each.rms_norm_backward(x, x, weight, layout="nchw") for each in (local, http)])


@pytest.mark.parametrize("rows", [0, 1, 7, 300, 5000])
def test_any_number_of_rows(http, local, rows):
    x = np.asarray(random(rows, 256))
    assert_same(*[each.layer_norm(x, stats=True) for each in (local, http)])
    assert_same(*[each.layer_norm_backward(x, x, np.ones(256, np.float32)) for each in (local, http)])


def test_registered_layers(http, local):
    weight, bias = (np.asarray(random(48, seed=seed)) for seed in (1, 2))
    assert local.put_layer("ln.a", "layer_norm", weight, bias, eps=1e-4, activation="silu") is True
    assert local.put_layer("ln.a", "layer_norm", weight, bias, eps=1e-4, activation="silu") is False
    assert local.layer("ln.a") == http.layer("ln.a")
    assert local.layers() == http.layers()
    x = np.asarray(random(5, 48))
    assert_same(*[each.layer_norm(x, layer="ln.a") for each in (local, http)])
    assert_same(*[each.layer_norm_backward(x, x, layer="ln.a") for each in (local, http)])
    local.put_layer("rms", "rms_norm", weight.astype(np.float16))
    assert_same(*[each.rms_norm_backward(x, x, layer="rms") for each in (local, http)])
    local.put_layer("gn", "group_norm", weight, num_groups=4)
    groups = np.asarray(random(2, 48, 3))
    assert_same(*[each.group_norm(groups, layer="gn", stats=True) for each in (local, http)])
    assert_same(*[each.group_norm_backward(groups, groups, layer="gn") for each in (local, http)])
    for name in ("ln.a", "rms", "gn"):
        local.delete_layer(name)
    with pytest.raises(UnknownLayerError):
        local.layer("ln.a")
    with pytest.raises(UnknownLayerError):
        local.delete_layer("ln.a")
    with pytest.raises(UnknownLayerError):
        local.layer_norm(x, layer="ln.a")


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("shape", [(6, 48), (4, 6, 48), (2, 1, 6, 48), (0, 6, 48)], ids=str)
def test_gradients_of_registered_layers_with_parameters_of_each_head(http, local, op, kind, shape):
    parameters = [kind(random(6, 48, seed=seed)) for seed in (1, 2)][: 1 + (op == "layer_norm")]
    local.put_layer("heads", op, *parameters, eps=1e-4)
    x, dy = kind(random(*shape)), kind(random(*shape, seed=3))
    for each in (http, local):
        backward = getattr(each, f"{op}_backward")
        for _ in range(3):
            assert_same(backward(dy, x, layer="heads"), backward(dy, x, *parameters, eps=1e-4))
    for of in ([6, 48], [48]):
        changed = [kind(random(*of, seed=seed)) for seed in range(4, 4 + len(parameters))]
        local.put_layer("heads", op, *changed)
        for each in (http, local):
            backward = getattr(each, f"{op}_backward")
            assert_same(backward(dy, x, layer="heads"), backward(dy, x, *changed))
    local.delete_layer("heads")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_layer_that_gets_heads_a_bias_or_a_wider_type_is_asked_for_anew(http, path, asynchronous):
    x, of_row, of_heads = (
        random(*shape, seed=seed).numpy() for seed, shape in enumerate([(4, 6, 48), (48,), (6, 48)])
    )
    changes = [[of_row.astype(np.float16)], [of_row], [of_row, of_row], [of_heads], [of_heads, of_heads], [of_row]]

    async def check_each():
        async with AsyncClient(f"unix://{path}") as client:
            for parameters in changes:
                http.put_layer("changing", "layer_norm", *parameters)
                for _ in range(2):
                    got = await client.layer_norm_backward(x, x, layer="changing")
                    assert_same(got, http.layer_norm_backward(x, x, *parameters))

    if asynchronous:
        asyncio.run(check_each())
    else:
        with Client(f"unix://{path}") as client:
            for parameters in changes:
                http.put_layer("changing", "layer_norm", *parameters)
                for _ in range(2):
                    got = client.layer_norm_backward(x, x, layer="changing")
                    assert_same(got, http.layer_norm_backward(x, x, *parameters))
    http.delete_layer("changing")


def test_a_request_that_is_wrong_stays_wrong_with_a_layer_of_heads(http, local):
    x = np.asarray(random(4, 6, 48))
    http.put_layer("heads", "layer_norm", np.asarray(random(6, 48)))
    for client in (http, local):
        with pytest.raises(InvalidRequestError, match=r"must be \[\.\.\., 6, N\]"):
            client.layer_norm_backward(x[:, :5], x[:, :5], layer="heads")
        with pytest.raises(InvalidRequestError, match="dy must be"):
            client.layer_norm_backward(x[:1], x, layer="heads")
    http.delete_layer("heads")


def test_what_the_server_is(http, local, path):
    limits = {"max_bytes": 2**28, "max_connections": 64, "max_device_bytes": 2**30}
    assert local.info()["local"] == {"path": str(path), "version": 1, **limits, "device": None}
    assert local.info().keys() == http.info().keys()


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda client, x: client.layer_norm(x, eps=-1.0), "invalid_parameter"),
        (lambda client, x: client.layer_norm(x, activation="swish"), "invalid_parameter"),
        (lambda client, x: client.layer_norm(x, np.ones(3, np.float32)), "invalid_shape"),
        (lambda client, x: client.layer_norm(x[0], layout="nchw"), "invalid_shape"),
        (lambda client, x: client.layer_norm(x, layout="chwn"), "invalid_parameter"),
        (lambda client, x: client.layer_norm(np.float32(1.0)[None].reshape(())), "invalid_shape"),
        (lambda client, x: client.group_norm(x), "invalid_parameter"),
        (lambda client, x: client.group_norm(x, 5), "invalid_parameter"),
        (lambda client, x: client.layer_norm_backward(x[:1], x), "invalid_shape"),
        (lambda client, x: client.layer_norm_backward(x, x, mean=np.ones(2, np.float32)), "missing_tensor"),
        (lambda client, x: client.layer_norm(x, dropout=0.5), "invalid_parameter"),
        (lambda client, x: client.layer_norm(x, layer="a/b"), "invalid_parameter"),
        (lambda client, x: client.layer_norm_backward(x, x, layer="a/b"), "invalid_parameter"),
        (lambda client, x: client.rms_norm_backward(x, x, layer=""), "invalid_parameter"),
        (lambda client, x: client.rms_norm_backward(x, x, layer="x" * 1000), "invalid_parameter"),
        (lambda client, x: client.put_layer("..", "layer_norm", x), "invalid_parameter"),
        (lambda client, x: client.put_layer("a/b", "layer_norm", x[0]), "invalid_parameter"),
        (lambda client, x: client.put_layer("ln\n", "layer_norm", x[0]), "invalid_parameter"),
        (lambda client, x: client.put_layer("", "layer_norm", x[0]), "invalid_parameter"),
        (lambda client, x: client.put_layer("l", "layer_norm", x[None]), "invalid_shape"),
        (lambda client, x: client.put_layer("l", "group_norm", x[0]), "invalid_parameter"),
    ],
)
def test_refusals_are_those_of_http(http, local, call, code):
    x = np.ones((2, 12), np.float32)
    told = []
    for client in (local, http):
        with pytest.raises(InvalidRequestError) as caught:
            call(client, x)
        told.append((caught.value.status, caught.value.code, caught.value.detail))
    assert told[0] == told[1]
    assert told[0][1] == code


@pytest.mark.parametrize("name", ["absent", "a/b", "/", "a\n", ""])
@pytest.mark.parametrize("method", ["layer", "delete_layer"])
def test_a_name_that_no_layer_has_is_unknown_over_either(http, local, method, name):
    for client in (local, http):
        with pytest.raises(UnknownLayerError):
            getattr(client, method)(name)
