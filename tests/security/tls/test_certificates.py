"""TLS in use: certificates that change under load, and what the server and its clients say of them."""

import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from normserve.client import Client, ConnectionFailedError

from tests.certificates import Certificates
from tests.integration.harness.servers import HTTP_PROCESSES
from tests.integration.harness.wire import X, assert_alive
from tests.security.tls.encrypted import WHOLE, ended, https, received, wrapped

ROOT = Path(__file__).parents[3]


def test_certificates_change_under_load_and_no_request_fails(start_server, tmp_path, until):
    files = Certificates(tmp_path / "files")
    server = start_server(*files.options())
    trust, first = files.trust(), files.serial()
    ending = threading.Event()

    def load(keeps: bool) -> int:
        """Requests on one connection, or a connection for each."""
        done = 0
        limits = httpx.Limits(max_keepalive_connections=1 if keeps else 0)
        with https(server, trust, limits=limits) as api:
            while not ending.is_set() or not done:
                assert_alive(api)
                done += 1
        return done

    with ThreadPoolExecutor(4) as pool, wrapped(server, trust) as old:
        loads = [pool.submit(load, keeps) for keeps in (True, True, False, False)]
        try:
            for change in range(3):
                files.renew()
                server.process.send_signal(signal.SIGHUP)
                until(lambda count=change + 1: server.log.count("reloaded the TLS files") == count * HTTP_PROCESSES)
                with wrapped(server, trust) as new:
                    assert new.getpeercert()["serialNumber"] == files.serial()
            key = files.key.read_bytes()
            last = files.serial()
            files.key.write_text("nothing")
            server.process.send_signal(signal.SIGHUP)
            until(lambda: "the old ones stay in use: tls_key: holds no private key" in server.log)
            with wrapped(server, trust) as new:
                assert new.getpeercert()["serialNumber"] == last
            files.key.write_bytes(key)
            server.process.send_signal(signal.SIGHUP)
            until(lambda: server.log.count("reloaded the TLS files") == 4 * HTTP_PROCESSES)
        finally:
            ending.set()
        assert all(each.result(60) > 0 for each in loads)
        assert old.getpeercert()["serialNumber"] == first
        old.sendall(WHOLE)
        assert received(old)[0].status_code == 200


def test_a_fleet_speaks_tls_and_changes_its_certificates(start_server, tmp_path, until):
    files = Certificates(tmp_path / "files")
    uds = tmp_path / "a.sock"
    fleet = start_server("--devices", "cpu,cpu", "--header-timeout-s", "2", "--uds", str(uds), *files.options())
    trust = files.trust()

    def serials() -> set[str]:
        """Of as many connections as reach each process."""
        seen = set()
        for _ in range(4):
            with wrapped(fleet, trust) as connection:
                seen.add(connection.getpeercert()["serialNumber"])
        return seen

    assert fleet.url.startswith("https://")
    with wrapped(fleet, trust) as old, socket.create_connection(fleet.address, timeout=20) as silent:
        old.sendall(WHOLE)
        assert received(old)[0].status_code == 200
        assert serials() == {files.serial()}
        files.renew()
        fleet.process.send_signal(signal.SIGHUP)
        until(lambda: fleet.log.count("reloaded the TLS files") == 2)
        assert serials() == {files.serial()}
        assert ended(silent)
        old.sendall(WHOLE)
        assert received(old)[0].status_code == 200
    with https(fleet, trust) as api:
        assert_alive(api)
        assert all(each["state"] == "ready" for each in api.get("/v1/info").json()["processes"])
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(uds), verify=False), base_url="http://localhost"
    ) as api:
        assert_alive(api)
    assert "Traceback" not in fleet.log
    fleet.terminate()
    assert fleet.wait() == 0


def test_the_line_that_is_printed_works(mutual, ours, tool, until):
    tool("curl")
    assert mutual.url.startswith("https://")

    def printed() -> list[str]:
        return [line.strip() for line in mutual.lines if line.strip().startswith("curl ")]

    until(printed)
    (line,) = printed()
    assert "--cacert ca.pem" in line
    assert "--cert client.pem" in line
    said = subprocess.run(["sh", "-c", line], cwd=ours.folder, capture_output=True, check=True)
    assert b"HTTP/1.1 200" in said.stdout
    assert (ours.folder / "y.npy").read_bytes().startswith(b"\x93NUMPY")


def test_the_page_says_how(secure, ours):
    with https(secure, ours.trust()) as api:
        page = api.get("/").text
    assert page.count(f"curl -sSf --cacert ca.pem {secure.url}/sample.npy") == 3


def test_the_python_client(mutual, ours, theirs):
    files = (str(ours.client), str(ours.client))
    for verify in (str(ours.ca), ours.trust()):
        for certificate in (str(ours.client), files):
            with Client(mutual.url, verify=verify, certificate=certificate) as client:
                right = torch.nn.functional.layer_norm(torch.from_numpy(X), (12,))
                torch.testing.assert_close(client.layer_norm(torch.from_numpy(X)).y, right)
    with Client(mutual.url, verify=str(theirs.ca)) as client, pytest.raises(ConnectionFailedError, match="VERIFY"):
        client.info()


def test_the_container_knows_whether_it_is_healthy(secure, mutual, uds):
    def asked(server, *path, **more):
        host, port = server.address
        environment = {"NORMSERVE_HOST": host, "NORMSERVE_PORT": str(port), **more}
        command = [sys.executable, str(ROOT / "docker/healthcheck.py"), *path]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert asked(secure, NORMSERVE_TLS_CERT="cert.pem").stdout == "ready\n"
    assert asked(secure, NORMSERVE_TLS_CERT="cert.pem", NORMSERVE_UDS=str(uds)).stdout == "ready\n"
    assert asked(secure, "/livez", NORMSERVE_TLS_CERT="cert.pem").stdout == "ok\n"
    for refused in (asked(secure), asked(mutual, NORMSERVE_TLS_CERT="cert.pem")):
        assert refused.returncode == 1
        assert refused.stderr.startswith("no answer: ")
