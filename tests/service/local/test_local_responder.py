"""What is counted and logged of a client's messages."""

import asyncio
import hashlib
import logging

import pytest
from normserve.admission.keys import ApiKey, Keyring, KeyScope
from normserve.codec import local_messages as frames
from normserve.errors import ConfigurationError, DeviceOutOfMemoryError, OverloadedError, UnsupportedDtypeError
from normserve.metrics.request_metrics import UNMATCHED

from tests.service.engine.fake_engine import turn
from tests.service.local.fake_wire import Client, played


def counted(client) -> dict[str, float]:
    """The samples of the server's metrics that are not 0."""
    text = client.scene.metrics.render().decode()
    samples = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#"]
    return {name.removeprefix("normserve_"): float(value) for name, _, value in samples if float(value)}


def requests_of(client) -> dict[tuple[str, str], float]:
    """How many messages were counted, by operation and status."""
    found = {}
    for name, value in counted(client).items():
        if name.startswith("requests_total{"):
            labels = dict(each.split("=") for each in name.removeprefix("requests_total{")[:-1].split(","))
            assert labels["transport"] == '"local"'
            found[labels["op"][1:-1], labels["code"][1:-1]] = value
    return found


def test_each_message_is_counted_once_by_what_became_of_it():
    async def body(client):
        before = requests_of(client)
        assert before == {("hello", "200"): 1, ("grow", "200"): 1}
        client.send(client.compute(), 1)
        await client.finish()
        client.send(client.compute(), 2)
        await client.finish(DeviceOutOfMemoryError("dry"))
        client.send(client.compute(query="layer=none"), 3)
        client.send(client.compute(query="layer=none"), 4)
        client.send(b"nothing", 5)
        client.send(client.compute(), 6)
        await turn()
        client.send(client.compute(), 7)
        await turn()
        client.send(frames.CancelRequestMessage(7))
        await client.finish()
        assert requests_of(client) == before | {
            ("layer_norm", "200"): 2,
            ("layer_norm", str(client.statuses()[2])): 1,
            ("layer_norm", "404"): 2,
            ("layer_norm", "499"): 1,
            (UNMATCHED, "400"): 1,
        }
        samples = counted(client)
        assert samples['errors_total{cause="unknown_layer"}'] == 2
        assert samples['cancelled_total{stage="queue"}'] == 1

    played(body)


def test_an_answer_that_nobody_gets_is_counted_as_its_client_s_departure():
    async def body(client):
        client.send(client.compute(), 1)
        await turn()
        client.wire.close()
        await client.finish()
        assert requests_of(client)["layer_norm", "499"] == 1
        assert ("layer_norm", "200") not in requests_of(client)

    played(body)


@pytest.mark.parametrize(
    ("error", "seconds"), [(OverloadedError("later", 7.2), 8), (UnsupportedDtypeError("never"), None)]
)
def test_a_refusal_says_when_to_come_again(error, seconds):
    async def body(client):
        client.send(client.compute(), 1)
        await client.finish(error)
        [(_, answer)] = client.wire.sent
        assert answer.problem["code"] == error.code
        assert answer.problem["request_id"] == answer.request_id
        assert (answer.retry_after_s or None) == seconds

    played(body)


def test_only_errors_of_the_server_itself_are_logged_with_whose_request_it_was(caplog):
    key = ApiKey("batch", hashlib.sha256(b"secret").digest(), frozenset([KeyScope.INFER]))

    async def run():
        client = Client(keys=Keyring([key], clock=lambda: 0.0))
        await client.start_and_capture_when_due(greet=False)
        await client.request(frames.HelloMessage(frames.VERSION, "secret"))
        await client.request(frames.GrowArenaMessage(1))
        client.send(client.compute(query="layer=none"), 1)
        client.send(client.compute(), 2)
        await client.finish(UnsupportedDtypeError("no kernel takes that"))
        assert not caplog.records
        client.wire.sent.clear()
        client.send(client.compute(), 3)
        await client.finish(ConfigurationError("it is wrong"))
        [(_, answer)] = client.wire.sent
        (record,) = caplog.records
        assert record.name == "normserve.failures"
        assert (record.fields["request_id"], record.fields["key"]) == (answer.request_id, "batch")
        client.wire.close()

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("is_logged", [False, True])
def test_the_access_log_has_a_line_for_each_message_where_it_is_asked_for(is_logged, caplog):
    caplog.set_level(logging.INFO, "normserve.access")

    async def body(client):
        object.__setattr__(client.service.request_services, "is_logged", is_logged)
        client.send(client.compute(), 1)
        await client.finish()
        lines = [record.fields for record in caplog.records if record.name == "normserve.access"]
        assert len(lines) == is_logged
        for line in lines:
            assert (line["method"], line["path"], line["status"]) == ("local", "layer_norm/forward", 200)
            assert (line["received_bytes"], line["sent_bytes"], line["key"]) == (32, 32, "-")
            assert line["request_id"] == client.wire.sent[0][1].request_id

    played(body)
