"""Modules and their clients: what fails, copies, pickles, and other processes."""

import copy
import io
import multiprocessing
import pickle

import pytest
import torch
from normserve.client import Client, ConnectionFailedError, InvalidRequestError, RetryPolicy
from torch import nn

from tests.integration.clients.torch_modules.pairs import assert_same, pair, passes, random


def test_failures_are_the_clients(client):
    _, module, shape = pair(client, "layer norm")
    with pytest.raises(TypeError, match="float64"):
        module(random(*shape).double())
    module.eps = 0.0
    with pytest.raises(InvalidRequestError, match="eps"):
        module(random(*shape))
    _, groups, _ = pair(client, "group norm")
    with pytest.raises(InvalidRequestError):
        groups(random(2, 13, 4))


def test_a_failure_of_backward_is_raised_where_that_is_called(one, tmp_path):
    _, module, shape = pair(one, "layer norm")
    y = module(random(*shape).requires_grad_())
    with Client(f"unix://{tmp_path / 'nobody'}", retries=RetryPolicy(tries=1)) as other:
        module.client = other
        with pytest.raises(ConnectionFailedError):
            module(random(*shape))
    # Of the client that forward had.
    y.sum().backward()
    assert one.calls[-1].path.endswith("/backward")


def test_a_service_that_ends_before_backward(launched):
    server = launched()
    with Client(server.url, retries=RetryPolicy(tries=1)) as client:
        _, module, shape = pair(client, "RMS norm")
        y = module(random(*shape).requires_grad_())
        server.stop()
        with pytest.raises(ConnectionFailedError):
            y.sum().backward()


@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "group norm"])
def test_copies_share_the_client_and_pickles_leave_it(one, kind):
    _, module, shape = pair(one, kind, activation="silu")
    x = random(*shape)
    expected = module(x)
    copied = copy.deepcopy(nn.Sequential(module))[0]
    assert copied.client is one
    assert copied.weight is not module.weight
    assert torch.equal(copied(x), expected)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for again in (pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        with pytest.raises(RuntimeError, match="has no client, which pickling leaves behind"):
            again(x)
        again.client = one
        assert torch.equal(again(x), expected)
    assert module.client is one


def test_a_client_of_its_own_in_a_copy(one, urls):
    _, module, _ = pair(one, "layer norm")
    copied = copy.deepcopy(module)
    with Client(urls["http"]) as other:
        copied.client = other
        assert copied.client is other
        assert module.client is one


def _forked(module, x, results):
    results.put([tensor.numpy() for tensor in passes(module, x)])


def test_a_module_in_a_forked_process(client):
    _, module, shape = pair(client, "layer norm")
    x = random(*shape)
    expected = passes(module, x)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_forked, args=(module, x, results))
    process.start()
    try:
        got = [torch.from_numpy(array) for array in results.get()]
    finally:
        process.kill()
        process.join()
    assert_same(got, expected)
