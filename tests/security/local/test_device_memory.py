"""References into a device's memory that lie, and more of it than there is; here that memory is the host's."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import numpy as np
import pytest
from normserve.codec import local_messages as frames

from tests.integration.harness.device_wire import DeviceConnection
from tests.integration.harness.local_wire import LocalConnection
from tests.service.memory.fake_driver import GRANULARITY

SCRIPT = str(Path(__file__).parents[2] / "integration" / "harness" / "device_server.py")
ROOT = Path(__file__).parents[3]
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)
QUOTA = 6 * GRANULARITY


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("device") / "normserve.sock"


@pytest.fixture(scope="module")
def serving(launched, path):
    options = ("--local", str(path), "--local-device-bytes", str(QUOTA))
    return launched(*options, script=SCRIPT, env={"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})


@pytest.fixture
def wire(serving, path):
    with DeviceConnection(path) as wire:
        yield wire
        # Whatever came before.
        number = wire.grow_device()
        wire.view(number)[:24] = X.flatten()
        assert wire.request(forward(number)).status == 200
        np.testing.assert_allclose(wire.view(number)[1024:1048].reshape(2, 12), normalised(X), atol=1e-5)


def normalised(x):
    return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)


def forward(segment, *, x=0, y=4096, of_y=None, shape=(2, 12), nbytes=96):
    return frames.ComputeMessage(
        op="layer_norm",
        tensors={"x": frames.TensorReference(segment, x, "float32", shape)},
        results={"y": frames.SegmentRange(segment if of_y is None else of_y, y, nbytes)},
    )


def device_bytes(serving) -> float:
    text = httpx.get(serving.url + "/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("normserve_local_device_bytes ")]
    return float(line.split()[1])


END = GRANULARITY


@pytest.mark.parametrize(
    "changes",
    [
        {"x": END - 80},
        {"x": 2**62},
        {"x": 2**63 - 16},
        {"x": 8},
        {"y": END - 80},
        {"y": 2**63 - 16},
        {"y": 4104},
        {"y": 16},
        {"nbytes": 95},
        {"nbytes": 2**63 - 1},
        {"shape": (2**40, 2**22)},
        {"shape": (2**62, 2**62)},
        {"of_y": 99},
    ],
)
def test_references_that_lie(wire, changes):
    number = wire.grow_device()
    assert len(wire.mapped[number]) == END
    answer = wire.request(forward(number, **changes))
    assert 400 <= answer.status < 500
    assert str(wire.mapped[number].address) not in str(answer.problem)
    assert not wire.view(number).any()


def test_the_memories_do_not_mix(wire):
    device, host = wire.grow_device(), wire.grow()
    for places in ({"segment": device, "of_y": host}, {"segment": host, "of_y": device}):
        answer = wire.request(forward(**places))
        assert answer.status == 422
        assert "all in device memory" in answer.problem["detail"]
    put = frames.PutLayerMessage(
        "l", "op=layer_norm", {"weight": frames.TensorReference(device, 0, "float32", (12,))}
    )
    answer = wire.request(put)
    assert answer.status == 422
    assert "in host memory" in answer.problem["detail"]


def test_anothers_segment_is_not_there(wire, path):
    numbers = [wire.grow_device(), wire.grow_device()]
    with DeviceConnection(path) as other:
        own = other.grow_device()
        for number in numbers:
            if number != own:
                assert other.request(forward(number)).status == 422
                assert other.request(forward(own, of_y=number)).status == 422


def test_what_is_given_back_is_of_no_use_and_comes_again_cleared(wire):
    number = wire.grow_device()
    wire.view(number)[:] = 5
    assert wire.request(forward(number)).status == 200
    wire.send(frames.FreeSegmentMessage(number))
    wire.send(frames.FreeSegmentMessage(number))
    assert wire.request(forward(number)).status == 422
    again = wire.grow_device()
    assert again != number
    assert not wire.view(again).any()


def test_requests_come_again_and_see_what_changed(wire):
    number = wire.grow_device()
    for factor in (1, 3, -2):
        wire.view(number)[:24] = factor * X.flatten()
        assert wire.request(forward(number)).status == 200
        np.testing.assert_allclose(wire.view(number)[1024:1048].reshape(2, 12), normalised(factor * X), atol=1e-5)
    assert wire.request(forward(number, y=0)).status == 200
    np.testing.assert_allclose(wire.view(number)[:24].reshape(2, 12), normalised(-2 * X), atol=1e-5)


def replayed(serving):
    """Requests that were answered without Python code: others of local clients have no stage "send"."""
    for line in httpx.get(serving.url + "/metrics").text.splitlines():
        if line.startswith('normserve_stage_duration_seconds_count{stage="send"}'):
            return int(float(line.split()[-1]))
    return 0


def test_what_comes_many_times_is_replayed_on_what_lies_there_then(serving, wire):
    number = wire.grow_device()
    before = replayed(serving)
    for factor in range(1, 31):
        wire.view(number)[:24] = factor * X.flatten()
        answer = wire.request(forward(number))
        assert answer.status == 200
        assert answer.results["y"] == frames.TensorReference(number, 4096, "float32", (2, 12))
        np.testing.assert_allclose(wire.view(number)[1024:1048].reshape(2, 12), normalised(factor * X), atol=1e-5)
    assert replayed(serving) - before >= 20
    # Another frame, and parts of one, are told apart from it.
    assert wire.request(forward(number, y=8192)).status == 200
    assert wire.request(forward(number, nbytes=95)).status == 422
    wire.view(number)[:24] = X.flatten()
    assert wire.request(forward(number)).status == 200
    np.testing.assert_allclose(wire.view(number)[1024:1048].reshape(2, 12), normalised(X), atol=1e-5)
    # Nor is anything left of it once its memory is given back.
    wire.send(frames.FreeSegmentMessage(number))
    assert wire.request(forward(number)).status == 422


def test_a_client_that_is_killed_amid_replays_harms_nobody(serving, path, wire, until):
    number = wire.grow_device()
    wire.view(number)[:24] = X.flatten()
    for _ in range(5):
        wire.request(forward(number))
    with DeviceConnection(path) as other:
        theirs = other.grow_device()
        for _ in range(5):
            other.request(forward(theirs))
        # Gone with answers that nobody reads.
        for tag in range(20):
            other.send(forward(theirs), tag)
    for _ in range(20):
        assert wire.request(forward(number)).status == 200
    np.testing.assert_allclose(wire.view(number)[1024:1048].reshape(2, 12), normalised(X), atol=1e-5)
    until(lambda: "\nnormserve_inflight_requests 0" in httpx.get(serving.url + "/metrics").text)


def test_connecting_anew_does_not_get_past_the_quota(serving, path, until):
    held = []
    for _ in range(8):
        with DeviceConnection(path) as wire:
            number = wire.grow_device(QUOTA // 2)
            held.append(wire.mapped[number])
            wire.view(number)[:] = 1
            if len(held) % 2:
                # Said to be given back, and still mapped.
                wire.send(frames.FreeSegmentMessage(number))
            wire.segments.clear()
        assert device_bytes(serving) <= QUOTA
    with DeviceConnection(path) as wire:
        assert wire.request(frames.GrowArenaMessage(QUOTA + 1, "device")).status == 413
        kept = 0
        while (answer := wire.request(frames.GrowArenaMessage(GRANULARITY, "device"))).status == 200:
            kept += 1
        assert answer.status == 429
        assert kept <= QUOTA // GRANULARITY
        for descriptor in wire._descriptors:
            os.close(descriptor)
    gc.collect()


CLIENT = """
    import sys
    from normserve.codec import local_messages as frames
    from tests.integration.harness.device_wire import DeviceConnection
    from tests.security.local.test_device_memory import forward
    wire = DeviceConnection(sys.argv[1])
    number = wire.grow_device(2 ** 22)
    print("ready", flush=True)
    while True:
        wire.send(forward(number), 7)
        wire.receive()
"""


def test_a_process_that_is_killed_gives_its_memory_back(launched, tmp_path, until):
    path = tmp_path / "own.sock"
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    options = ("--local", str(path), "--local-device-bytes", str(QUOTA))
    serving = launched(*options, script=SCRIPT, env=environment)
    for _ in range(2):
        command = [sys.executable, "-c", textwrap.dedent(CLIENT), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment}) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"ready\n"
            assert device_bytes(serving) == 2**22
            client.send_signal(signal.SIGKILL)
        until(lambda: device_bytes(serving) == 0)
    with DeviceConnection(path) as wire:
        number = wire.grow_device()
        wire.send(frames.FreeSegmentMessage(number))
        assert wire.request(forward(number)).status == 422
        # It is mapped still, whatever was said.
        assert [device_bytes(serving) for _ in range(10)] == [GRANULARITY] * 10


def test_a_server_without_a_device_lends_none(launched, tmp_path):
    path = tmp_path / "plain.sock"
    serving = launched("--local", str(path))
    with LocalConnection(path, greet=False) as connection:
        greeting = connection.request(frames.HelloMessage(frames.VERSION))
        assert greeting.document["device"] is None
        answer = connection.request(frames.GrowArenaMessage(1, "device"))
        assert (answer.status, answer.problem["code"]) == (422, "invalid_parameter")
        elsewhere = b'{"do":"grow","nbytes":1,"memory":"elsewhere"}'
        connection.socket.sendall(frames.PREFIX.pack(len(elsewhere), 9) + elsewhere)
        assert connection.receive()[1].status == 400
        assert connection.layer_norm(X).status == 200
    assert httpx.get(serving.url + "/v1/info").json()["local"]["device"] is None
