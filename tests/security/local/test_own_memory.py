"""Memory of the device that clients have allocated themselves: handles that lie, and ends at any moment."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import httpx
import numpy as np
import pytest
from normserve.codec import local_frames as frames
from normserve.local.own_memory import MOST_OPEN
from normserve.memory.allocations import allocation_of
from normserve.memory.device_segments import Device

from tests.integration.harness.local_wire import LocalConnection
from tests.security.local.test_device_memory import ROOT, SCRIPT, X, forward, normalised
from tests.service.memory.fake_driver import FakeDriver, bytes_at

NBYTES = 2**21
NOBODY = 12345


class Owner(LocalConnection):
    """A client with allocations of its own."""

    def __init__(self, path) -> None:
        self.driver = FakeDriver()
        self.device = Device(0, self.driver)
        super().__init__(path)

    def close(self) -> None:
        super().close()
        for address in tuple(self.driver.allocations):
            self.driver.free(address)

    def message(self, address: int) -> frames.Own:
        found = allocation_of(self.device, address)
        return frames.Own(found.handle.hex(), found.nbytes)

    def offer(self, nbytes: int = NBYTES) -> tuple[int, int]:
        """A new allocation: its address, and its number at the server."""
        address = self.driver.allocate(nbytes)
        answer = self.request(self.message(address))
        assert answer.status == 200, answer
        assert (answer.nbytes, answer.device) == (nbytes, self.device.uuid)
        return address, answer.opened

    def view(self, address: int) -> np.ndarray:
        return np.frombuffer(bytes_at(address, NBYTES), np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("own") / "normserve.sock"


@pytest.fixture(scope="module")
def environment():
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.fixture(scope="module")
def serving(launched, path, environment):
    return launched("--local", str(path), "--local-own-memory", script=SCRIPT, env=environment)


def opened_by(serving) -> int:
    """How many allocations of others the server has mapped."""
    maps = Path(f"/proc/{serving.owner}/maps").read_text(encoding="utf-8")
    return maps.count("memfd:allocation")


@pytest.fixture
def owner(serving, path, until):
    with Owner(path) as owner:
        yield owner
        # Whatever came before.
        address, number = owner.offer()
        assert_computed(owner, address, number)
    until(lambda: opened_by(serving) == 0)


def assert_computed(owner, address, number):
    owner.view(address)[:24] = X.flatten()
    assert owner.request(forward(number)).status == 200
    np.testing.assert_allclose(owner.view(address)[1024:1048].reshape(2, 12), normalised(X), atol=1e-5)


def test_the_greeting_and_info_say_that_it_may_be(serving, owner):
    assert owner.request(frames.Hello(frames.VERSION)).document["device"]["own"] is True
    assert httpx.get(serving.url + "/v1/info").json()["local"]["own_memory"] is True


def test_what_a_client_has_allocated_is_computed_where_it_lies(owner):
    address, number = owner.offer()
    for factor in (1, -3):
        owner.view(address)[:24] = factor * X.flatten()
        assert owner.request(forward(number)).status == 200
        expected = normalised(factor * X)
        np.testing.assert_allclose(owner.view(address)[1024:1048].reshape(2, 12), expected, atol=1e-5)


@pytest.mark.parametrize(
    "change", [b"", b"00", b"00" * 63, b"00" * 65, b"0" * 127, b"zz" * 64, b"AB" * 64, b"\\u0660" * 128]
)
def test_a_handle_of_another_form_is_no_message(owner, change):
    content = b'{"do":"own","nbytes":2097152,"handle":"' + change + b'"}'
    owner.socket.sendall(frames.PREFIX.pack(len(content), 9) + content)
    assert owner.receive()[1].status == 400


def test_a_handle_of_nothing(owner):
    for handle in ("00" * 64, os.urandom(64).hex()):
        answer = owner.request(frames.Own(handle, NBYTES))
        assert (answer.status, answer.problem["code"]) == (422, "invalid_parameter")
        assert answer.opened is None
        assert handle not in str(answer.problem)


@pytest.mark.parametrize("nbytes", [0, NBYTES + 1, 2**40, 2**63 - 1])
def test_a_false_extent(serving, owner, nbytes, until):
    message = owner.message(owner.driver.allocate(NBYTES))
    answer = owner.request(frames.Own(message.handle, nbytes))
    assert answer.status == 422
    assert "bytes" in answer.problem["detail"]
    until(lambda: opened_by(serving) == 0)


def test_less_than_all_of_it_is_all_that_is_used(owner):
    message = owner.message(owner.driver.allocate(NBYTES))
    answer = owner.request(frames.Own(message.handle, 4096))
    assert answer.status == 200
    assert owner.request(forward(answer.opened, y=4096)).status == 422
    assert owner.request(forward(answer.opened, y=2048)).status == 200


@pytest.mark.parametrize(
    "changes",
    [{"x": NBYTES}, {"x": NBYTES - 80}, {"x": 2**63 - 16}, {"y": NBYTES - 80}, {"y": 2**63 - 16}, {"x": 8}],
)
def test_references_past_the_end(owner, changes):
    address, number = owner.offer()
    assert owner.request(forward(number, **changes)).status == 422
    assert not owner.view(address).any()


def test_anothers_is_not_there(owner, path):
    _, number = owner.offer()
    with Owner(path) as other:
        assert other.request(forward(number)).status == 422


def test_too_many(serving, owner, until):
    address = owner.driver.allocate(NBYTES)
    numbers = [owner.request(owner.message(address)).opened for _ in range(MOST_OPEN)]
    assert len({*numbers}) == MOST_OPEN
    refused = owner.request(owner.message(address))
    assert (refused.status, refused.retry_after_s) == (429, 1)
    # As one frame, where each is looked at before any is open.
    owner.send([owner.message(address)] * 4, 1000)
    assert {owner.receive()[1].status for _ in range(4)} == {429}
    for number in numbers:
        owner.send(frames.Free(number))
    until(lambda: opened_by(serving) == 0)


def test_what_was_withdrawn_is_of_no_use(serving, owner, until):
    address, number = owner.offer()
    assert_computed(owner, address, number)
    owner.send(frames.Free(number))
    owner.send(frames.Free(number))
    assert owner.request(forward(number)).status == 422
    until(lambda: opened_by(serving) == 0)
    assert owner.request(owner.message(address)).opened != number


def test_requests_that_are_under_way_keep_what_is_withdrawn(serving, owner, until):
    address, number = owner.offer()
    owner.view(address)[:24] = X.flatten()
    for tag in range(1, 33):
        owner.send(forward(number, y=4096 * tag), tag)
    owner.send(frames.Free(number))
    answers = dict([owner.receive() for _ in range(32)])
    assert {answer.status for answer in answers.values()} == {200}
    for tag in range(1, 33):
        found = owner.view(address)[1024 * tag : 1024 * tag + 24].reshape(2, 12)
        np.testing.assert_allclose(found, normalised(X), atol=1e-5)
    until(lambda: opened_by(serving) == 0)


def test_a_connection_that_ends_while_it_computes(serving, path, until):
    rows = (2**23 // 1024, 64)
    for _ in range(5):
        owner = Owner(path)
        _, number = owner.offer(2**23)
        for tag in range(1, 9):
            owner.send(forward(number, y=2**22, shape=rows, nbytes=2**21), tag)
        owner.socket.close()
        until(lambda: opened_by(serving) == 0)
        for address in tuple(owner.driver.allocations):
            owner.driver.free(address)


CLIENT = """
    import sys
    from tests.security.local.test_own_memory import Owner, forward
    owner = Owner(sys.argv[1])
    _, number = owner.offer()
    print("ready", flush=True)
    while True:
        owner.send(forward(number), 7)
        owner.receive()
"""


def test_a_process_that_is_killed(serving, path, owner, environment, until):
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment}) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        assert opened_by(serving) == 1
        client.send_signal(signal.SIGKILL)
    until(lambda: opened_by(serving) == 0)


STRANGER = """
    import json, socket, struct, sys
    client = socket.socket(socket.AF_UNIX)
    client.connect(sys.argv[1])
    for message in ({"do": "hello", "version": 1}, {"do": "own", "handle": "00" * 64, "nbytes": 4096}):
        content = json.dumps(message).encode()
        client.sendall(struct.pack("<II", len(content), 1) + content)
        answer = json.loads(client.recv(65536)[8:])
        print(answer["status"], answer.get("document", {}).get("device", {}).get("own"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_users_process(launched, environment):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "normserve.sock"
        users = ("--local-users", str(NOBODY))
        launched("--local", str(path), "--local-own-memory", *users, script=SCRIPT, env=environment)
        command = ["/usr/bin/env", "python3", "-c", textwrap.dedent(STRANGER), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, user=NOBODY, cwd="/")
        assert done.stdout.split() == ["200", "False", "403", "None"], done.stderr


def test_switched_off(launched, tmp_path, environment):
    path = tmp_path / "off.sock"
    launched("--local", str(path), script=SCRIPT, env=environment)
    with Owner(path) as owner:
        assert owner.request(frames.Hello(frames.VERSION)).document["device"]["own"] is False
        answer = owner.request(owner.message(owner.driver.allocate(NBYTES)))
        assert (answer.status, answer.problem["code"]) == (403, "forbidden")
        assert "--local-own-memory" in answer.problem["detail"]


def test_a_server_without_a_device(launched, tmp_path):
    path = tmp_path / "plain.sock"
    launched("--local", str(path), "--local-own-memory")
    with Owner(path) as owner:
        assert owner.request(owner.message(owner.driver.allocate(NBYTES))).status == 422
