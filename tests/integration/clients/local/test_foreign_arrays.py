"""Arrays of other libraries over shared memory: the same bits as numpy's, one at a time and in lists."""

import asyncio

import numpy as np
import pytest
from normserve.client import AsyncClient

from tests.integration.clients.local.results import random
from tests.service.client.harness.foreign_library import ForeignArray, PlainArray


def make_arrays():
    return [random(rows, 48, seed=rows).numpy() for rows in (6, 1, 3)], random(48).numpy()


def assert_same(found, right, kind):
    assert type(found) is kind
    np.testing.assert_array_equal(np.asarray(found), right)


@pytest.mark.parametrize(("kind", "result_kind"), [(ForeignArray, ForeignArray), (PlainArray, np.ndarray)])
def test_results_have_the_bits_of_numpys(local, kind, result_kind):
    (x, *_), weight = make_arrays()
    for _ in range(3):
        right = local.layer_norm(x, weight, residual=x, stats=True)
        got = local.layer_norm(kind(x), kind(weight), residual=kind(x), stats=True)
        for name in ("y", "residual_out", "mean", "rstd"):
            assert_same(getattr(got, name), getattr(right, name), result_kind)
        right = local.layer_norm_backward(x, x, weight)
        got = local.layer_norm_backward(kind(x), kind(x), weight)
        assert_same(got.dx, right.dx, result_kind)
        assert_same(got.dweight, right.dweight, np.ndarray)


def test_lists_are_lists_of_the_library(local):
    x, weight = make_arrays()
    foreign = [ForeignArray(each) for each in x]
    right, got = local.layer_norm(x, weight, stats=True), local.layer_norm(foreign, weight, stats=True)
    for name in ("y", "mean", "rstd"):
        for found, expected in zip(getattr(got, name), getattr(right, name), strict=True):
            assert_same(found, expected, ForeignArray)
    right = local.layer_norm_backward(x, x, weight, scale=x, shift=x)
    got = local.layer_norm_backward(x, foreign, weight, scale=foreign, shift=x)
    for name, kind in {"dx": ForeignArray, "dscale": ForeignArray, "dshift": np.ndarray}.items():
        for found, expected in zip(getattr(got, name), getattr(right, name), strict=True):
            assert_same(found, expected, kind)
    assert_same(got.dweight, right.dweight, np.ndarray)


@pytest.mark.parametrize("client", ["local", "http"])
@pytest.mark.parametrize(
    ("value", "text"),
    [([1.0], "got a list of float; np.asarray"), ([], "at least one array"), ([object()], "x.0 must be .*object")],
)
def test_what_is_no_array_is_refused_alike(request, client, value, text):
    with pytest.raises(TypeError, match=text):
        request.getfixturevalue(client).layer_norm(value)


def test_the_asynchronous_client(serving, path, local):
    (x, *_), weight = make_arrays()

    async def ask():
        async with AsyncClient(f"unix://{path}") as client:
            return await client.layer_norm(ForeignArray(x), weight), await client.layer_norm([ForeignArray(x)])

    got, got_list = asyncio.run(ask())
    assert_same(got.y, local.layer_norm(x, weight).y, ForeignArray)
    assert_same(got_list.y[0], local.layer_norm(x).y, ForeignArray)


@pytest.mark.parametrize("client", ["local", "http"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_of_jax(request, client, dtype):
    jax = pytest.importorskip("jax")
    sender = request.getfixturevalue(client)
    arrays, weight = make_arrays()
    x = [jax.numpy.asarray(each, dtype) for each in arrays]
    right = [sender.layer_norm(np.asarray(each), weight, activation="silu").y for each in x]
    got = [sender.layer_norm(x[0], jax.numpy.asarray(weight), activation="silu").y]
    got += sender.layer_norm(x, weight, activation="silu").y
    for found, expected in zip(got, [right[0], *right], strict=True):
        assert isinstance(found, jax.Array)
        assert found.dtype == x[0].dtype
        np.testing.assert_array_equal(np.asarray(found), expected)
