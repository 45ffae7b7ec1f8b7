"""Calls that come again over shared memory: what changed in between counts, and answers are those of HTTP."""

import asyncio

import numpy as np
import pytest
import torch
from normserve.client import AsyncClient, Client, ConnectionFailedError, RetryPolicy, UnknownLayerError
from normserve.client.calls import operations

ONCE = RetryPolicy(tries=1)
ROWS = (6, 48)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("local") / "normserve.sock"


@pytest.fixture(scope="module")
def http(launched, path):
    with Client(launched("--local", str(path)).url, retries=ONCE) as client:
        yield client


class Blocking:
    """An `AsyncClient`, called as a `Client`."""

    def __init__(self, url):
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, retries=ONCE)

    def __getattr__(self, name):
        attribute = getattr(self._client, name)
        return lambda *args, **named: self._runner.run(attribute(*args, **named))

    def close(self):
        self._runner.run(self._client.close())
        self._runner.close()

    @property
    def _transport(self):
        return self._client._transport


@pytest.fixture(params=["blocking", "async"])
def client(request, http, path):
    url = f"unix://{path}"
    made = Client(url, retries=ONCE) if request.param == "blocking" else Blocking(url)
    yield made
    made.close()


@pytest.fixture
def there(client):
    """x, weight and dy in the shared memory."""
    made = []
    for number, shape in enumerate((ROWS, ROWS[1:], ROWS)):
        array = client.empty(shape)
        array[:] = np.random.default_rng(number).standard_normal(shape)
        made.append(array)
    return made


NUMPY, TORCH = np.ones(1), torch.ones(1)


def known(client, like=NUMPY):
    """How many calls with arrays of one kind are known that may come again."""
    return len(client._transport._connection.call_caches.get_cache(like).calls)


def test_arrays_that_change_in_their_places_are_read_anew(client, http, there):
    x, weight, dy = there
    for turn in range(4):
        x += turn
        weight *= 1.5
        y = client.layer_norm(x, weight, eps=1e-3, stats=True)
        expected = http.layer_norm(x.copy(), weight.copy(), eps=1e-3, stats=True)
        for name in ("y", "mean", "rstd"):
            np.testing.assert_array_equal(getattr(y, name), getattr(expected, name), strict=True)
        assert y.residual_out is None
        gradients = client.layer_norm_backward(dy, x, weight)
        expected = http.layer_norm_backward(dy.copy(), x.copy(), weight.copy())
        for name in ("dx", "dweight"):
            np.testing.assert_array_equal(getattr(gradients, name), getattr(expected, name), strict=True)
        assert gradients.dbias is None
        assert y.timing.request_id
    assert known(client) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_torch_that_change_in_their_places_are_read_anew(client, http, dtype):
    x, weight, dy = (client.empty(shape, dtype).normal_() for shape in (ROWS, ROWS[1:], ROWS))
    for turn in range(4):
        x += turn
        weight *= 1.5
        y = client.layer_norm(x, weight, eps=1e-3, stats=True)
        expected = http.layer_norm(x.clone(), weight.clone(), eps=1e-3, stats=True)
        for name in ("y", "mean", "rstd"):
            torch.testing.assert_close(getattr(y, name), getattr(expected, name), rtol=0, atol=0)
        gradients = client.layer_norm_backward(dy, x, weight)
        expected = http.layer_norm_backward(dy.clone(), x.clone(), weight.clone())
        for name in ("dx", "dweight"):
            torch.testing.assert_close(getattr(gradients, name), getattr(expected, name), rtol=0, atol=0)
        assert gradients.dbias is None
    assert (known(client), known(client, TORCH)) == (0, 2)


def test_results_that_are_kept_are_not_written_over(client, there):
    x = there[0]
    kept = []
    for turn in range(5):
        x[:] = np.arange(48) ** (turn + 1)
        kept.append((client.rms_norm(x).y, client.rms_norm(x.copy()).y.copy()))
    for y, expected in kept:
        np.testing.assert_array_equal(y, expected)
    assert known(client) == 2


@pytest.mark.parametrize("make", [np.asarray, torch.tensor])
def test_tensors_that_lie_elsewhere_are_copied_at_each_call(client, http, make):
    rng = np.random.default_rng(5)
    for _ in range(5):
        x, weight, bias, dy = (
            make(rng.standard_normal(shape).astype(np.float32)) for shape in (ROWS, ROWS[1:], ROWS[1:], ROWS)
        )
        got, expected = (each.layer_norm(x, weight, bias=bias, eps=1e-3, stats=True) for each in (client, http))
        for name in ("y", "mean", "rstd"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), strict=True)
        got, expected = (
            each.layer_norm_backward(dy, x, weight, bias=bias, mean=expected.mean, rstd=expected.rstd)
            for each in (client, http)
        )
        for name in ("dx", "dweight", "dbias"):
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), strict=True)
    assert known(client, x) == 2


def test_an_array_as_a_parameter_counts_each_time(client, http):
    x = np.ones(ROWS, np.float32) * np.arange(ROWS[1], dtype=np.float32)
    for eps in (1e-5, 1e3, 1.0):
        got, expected = (each.layer_norm(x, eps=np.array(eps)).y for each in (client, http))
        np.testing.assert_array_equal(got, expected)
    assert known(client) == 0


def test_a_layer_that_changes_counts_and_one_that_goes_is_missed(client, http, there):
    x, weight, _ = there
    for factor in (1, 2):
        http.put_layer("changing", "layer_norm", weight * factor, eps=1e-5)
        for _ in range(3):
            expected = http.layer_norm(x.copy(), weight * factor).y
            np.testing.assert_array_equal(client.layer_norm(x, layer="changing").y, expected)
    http.delete_layer("changing")
    for _ in range(2):
        with pytest.raises(UnknownLayerError):
            client.layer_norm(x, layer="changing")


def test_arguments_that_are_wrong_are_wrong_each_time(client, there):
    x = there[0]
    for _ in range(2):
        with pytest.raises(TypeError):
            client.layer_norm(x, nothing=1)
        with pytest.raises(TypeError):
            client.layer_norm()
        with pytest.raises(TypeError, match="x must be"):
            client.layer_norm("x")
        with pytest.raises(TypeError, match="positional"):
            client.layer_norm(*[x.copy()] * 20)
        with pytest.raises(TypeError, match="float64"):
            client.layer_norm(x, x.astype(np.float64))


def test_out_of_types_that_numpy_lacks_nothing_is_sent(client, there, plain_numpy):
    for _ in range(2):
        with pytest.raises(TypeError, match="bfloat16"):
            client.layer_norm(there[0], out_dtype="bfloat16")


def test_a_call_that_comes_again_is_not_made_anew(client, there, monkeypatch):
    x = there[0]
    client.rms_norm(x)
    expected = client.rms_norm(x).y.copy()
    monkeypatch.setattr(operations, "make_forward_call", None)
    np.testing.assert_array_equal(client.rms_norm(x).y, expected)


def test_another_connection_learns_for_itself(client, http, there, path):
    x = there[0]
    client.rms_norm(x)
    expected = client.rms_norm(x).y.copy()
    link = client._transport._connection
    link._socket.shutdown(2)
    with pytest.raises(ConnectionFailedError):
        client.rms_norm(x)
    # Its arena is the old one's: what lies there is copied now.
    for _ in range(2):
        np.testing.assert_array_equal(client.rms_norm(x).y, expected)
    assert client._transport._connection is not link
    assert known(client) == 1


def test_tasks_that_are_cancelled_keep_their_places_until_they_are_answered(http, path):
    async def run():
        async with AsyncClient(f"unix://{path}") as client:
            x = await client.empty((256, 1024))
            x[:] = 2
            right = (await client.rms_norm(x)).y
            for _ in range(20):
                task = asyncio.create_task(client.rms_norm(x))
                await asyncio.sleep(0)
                task.cancel()
                found = (await client.rms_norm(x)).y
                np.testing.assert_array_equal(found, right)
            link = client._transport._connection
            await client.info()
            assert not link.protocol.has_pending

    asyncio.run(asyncio.wait_for(run(), 20))
