"""Inference requests whose JSON came before: what is prepared of them, and what is checked each time."""

import asyncio
import json
from dataclasses import replace

import pytest
from normserve.http.oip import inference_routes
from normserve.requests import prepared_calls

from tests.service.http.relay.owner_scene import HEADERS, OwnerScene, _play, scene, until
from tests.service.jobs.fake_jobs import layer

PATH = "/v2/models/{}/infer"
KEY = b"k" * 40


def said(rows: int = 2, **more: object) -> dict[str, object]:
    size = {"binary_data_size": 16 * rows}
    return {"inputs": [{"name": "x", "shape": [rows, 4], "datatype": "FP32", "parameters": size}], **more}


@pytest.fixture
def counts(monkeypatch):
    """How many headers were parsed, and jobs checked."""
    counts = {"parsed": 0, "checked": 0}

    def counting(name: str, function):
        def call(*given, **named):
            counts[name] += 1
            return function(*given, **named)

        return call

    monkeypatch.setattr(inference_routes, "parse_header", counting("parsed", inference_routes.parse_header))
    monkeypatch.setattr(
        prepared_calls, "make_validated_job", counting("checked", prepared_calls.make_validated_job)
    )
    return counts


class Asking:
    """Requests through a front end, one after another.

    Attributes:
        specs: of those that were computed.
    """

    def __init__(self, owner: OwnerScene) -> None:
        self._owner = owner
        self._front_end = owner.front_end()
        self._number = 0
        self.specs: list = []

    async def status(
        self, document: object, data: bytes = bytes(32), model: str = "layer_norm", key: bytes | None = KEY, **given
    ) -> int:
        """Args: document: of the JSON header; None sends none, and a dict with data is the whole body."""
        self._number += 1
        text = b"" if document is None else json.dumps(document).encode()
        headers = HEADERS if key is None else (*HEADERS, (b"authorization", b"Bearer " + key))
        headers = (*headers, (b"inference-header-content-length", b"%d" % len(text)))
        self._front_end.request(self._number, text + data, path=PATH.format(model), headers=headers, **given)
        await until(lambda: self._owner.executor.running or self._front_end.said_of(self._number))
        if self._owner.executor.running:
            self.specs.append(self._owner.executor.running[0][0].jobs[0].spec)
            self._owner.executor.finish()
        status = (await self._front_end.answer(self._number)).status
        await until(lambda: self._owner.is_idle)
        return status


def played(body, **settings: object) -> None:
    async def play(owner: OwnerScene) -> None:
        await body(owner, Asking(owner))

    asyncio.run(_play(OwnerScene(**settings), play))


def test_json_that_came_before_is_neither_parsed_nor_checked(counts):
    async def body(owner, asking):
        assert [await asking.status(said()) for _ in range(3)] == [200] * 3
        assert counts == {"parsed": 1, "checked": 1}
        assert await asking.status(said(3), bytes(48)) == 200
        assert counts == {"parsed": 2, "checked": 2}
        # The same JSON before another length of data.
        assert await asking.status(said(), bytes(48)) == 400

    played(body)


def test_x_alone_is_checked_once(counts):
    async def body(owner, asking):
        assert [await asking.status(None) for _ in range(3)] == [200] * 3
        assert counts == {"parsed": 0, "checked": 1}

    played(body)


def test_an_empty_body_is_an_x_only_if_its_json_is_said_to_be_empty():
    @scene
    async def play(owner):
        front_end = owner.front_end()
        asking = Asking(owner)
        # x needs at least one column.
        assert await asking.status(None, b"") == 422
        front_end.request(1000, b"", path=PATH.format("layer_norm"), headers=HEADERS)
        assert (await front_end.answer(1000)).status == 400

    play()


def test_data_in_json_are_read_each_time(counts):
    def with_data(value: float) -> dict[str, object]:
        return {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [value] * 4}]}

    async def body(owner, asking):
        assert [await asking.status(with_data(1.0), b"") for _ in range(2)] == [200] * 2
        assert counts == {"parsed": 2, "checked": 1}

    played(body)


def test_another_layer_of_the_name_is_checked_anew(counts):
    async def body(owner, asking):
        layers = owner.service.layers
        layers.put_or_replace(layer("a", 4))
        assert [await asking.status(said(), model="a") for _ in range(2)] == [200] * 2
        assert counts["checked"] == 1
        layers.put_or_replace(layer("a", 5))
        assert await asking.status(said(), model="a") == 422
        layers.put_or_replace(layer("a", 4, eps=0.5))
        assert await asking.status(said(), model="a") == 200
        assert asking.specs[-1].eps == 0.5
        layers.remove("a")
        assert await asking.status(said(), model="a") == 404

    played(body)


def test_a_tenant_with_endless_json_evicts_nothing_of_another(counts):
    async def body(owner, asking):
        owner.relays._prepared_calls.max_bytes = 2**18
        assert await asking.status(said(), client=("127.0.0.2", 1)) == 200
        for number in range(100):
            await asking.status(said(id=f"{number}"), client=("127.0.0.3", 1))
            assert owner.relays._prepared_calls.nbytes <= 2**18
        before = dict(counts)
        assert await asking.status(said(), client=("127.0.0.2", 2)) == 200
        assert counts == before

    played(body)


def test_key_and_rate_are_checked_for_each_request_with_the_same_json(counts):
    async def body(owner, asking):
        keys = owner.service.keyring
        assert await asking.status(said()) == 200
        assert await asking.status(said(), key=None) == 401
        grant = keys.find_by_token(KEY)
        keys.replace_keys([replace(grant.key, requests_per_second=1e-6)])
        assert [await asking.status(said()) for _ in range(2)] == [200, 429]
        keys.replace_keys([replace(grant.key, scopes=frozenset())])
        assert await asking.status(said()) == 403
        keys.replace_keys([])
        assert await asking.status(said()) == 401
        assert counts == {"parsed": 1, "checked": 1}

    played(body, api_key=KEY.decode())
