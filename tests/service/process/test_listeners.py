"""Where a server listens: sockets at paths, addresses of both families, and whose each of them is."""

import contextlib
import os
import select
import socket
import tempfile

import pytest
from normserve.process.listeners import ListenError, open_listeners, open_local_listener
from normserve.settings import Settings


def settings_for(kind, path) -> Settings:
    return Settings(port=0, **{kind: path})


@contextlib.contextmanager
def listening_at(kind, path):
    """The socket at a path of `--uds` or `--local`."""
    settings = settings_for(kind, path)
    if kind == "local":
        with open_local_listener(settings) as listener:
            yield listener
    else:
        with open_listeners(settings) as listeners:
            yield listeners[-1]


def can_connect(path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


kinds = pytest.mark.parametrize("kind", ["uds", "local"])


@kinds
def test_the_socket_of_a_live_server_is_refused_and_left_alone(kind, tmp_path):
    path = tmp_path / "socket"
    with listening_at(kind, path):
        with pytest.raises(ListenError, match=f"--{kind} {path}: .*listens"), listening_at(kind, path):
            pass
        assert can_connect(path)
    assert not path.exists()


@kinds
def test_a_server_with_a_full_queue_is_alive(kind, tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as clients:
        busy.bind(str(path))
        busy.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
        with pytest.raises(ListenError, match="listens"), listening_at(kind, path):
            pass


@kinds
def test_a_datagram_socket_in_use_is_refused(kind, tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(ListenError, match=f"--{kind} {path}"), listening_at(kind, path):
            pass
        assert path.exists()


@kinds
def test_the_socket_that_a_dead_server_left_is_replaced(kind, tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    with listening_at(kind, path):
        assert can_connect(path)
    assert not path.exists()


@kinds
def test_a_file_is_not_replaced(kind, tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    with pytest.raises(ListenError, match=f"--{kind} {path}"), listening_at(kind, path):
        pass
    assert path.read_text() == "kept"


@kinds
def test_a_folder_that_is_missing_is_named_with_its_setting(kind, tmp_path):
    path = tmp_path / "missing" / "socket"
    with pytest.raises(ListenError, match=f"--{kind} {path}: No such file"), listening_at(kind, path):
        pass


@kinds
def test_a_path_that_another_has_taken_meanwhile_is_not_removed(kind, tmp_path):
    path = tmp_path / "socket"
    with listening_at(kind, path), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
        other.listen()
        taken = path.stat()
    assert os.path.samestat(path.stat(), taken)


@kinds
def test_a_path_that_somebody_has_removed_is_no_error(kind, tmp_path):
    path = tmp_path / "socket"
    with listening_at(kind, path):
        path.unlink()


@kinds
def test_the_end_of_the_server_is_not_hidden_by_an_error_of_its_own(kind, tmp_path):
    path = tmp_path / "socket"
    with pytest.raises(ValueError, match="its own"), listening_at(kind, path):
        raise ValueError("its own")
    assert not path.exists()


def test_the_socket_of_local_clients_is_the_users_own(tmp_path):
    path = tmp_path / "socket"
    with listening_at("local", path):
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1"])
def test_a_host_that_is_not_here_is_named_with_its_setting(host):
    with pytest.raises(ListenError, match=f"--host {host}"), open_listeners(Settings(host=host, port=0)):
        pass


def test_a_port_in_use_is_named():
    with open_listeners(Settings(port=0)) as (listener,):
        port = listener.getsockname()[1]
        with pytest.raises(ListenError, match=f"already in use.*{port}"), open_listeners(Settings(port=port)):
            pass


def test_that_no_folder_can_have_the_gateways_socket_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ListenError, match="TMPDIR"), open_listeners(Settings(port=0, grpc_port=0)):
        pass


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_all_addresses_of_ipv6_are_those_of_ipv4_too():
    with open_listeners(Settings(host="::", port=0)) as listeners:
        ports = {listener.getsockname()[1] for listener in listeners}
        assert len(ports) == 1
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, *ports)):
                (accepting,) = select.select(listeners, (), (), 10)[0]
                connection, address = accepting.accept()
                connection.close()
                # A client of IPv4 has its own address in logs, limits and shares, none of IPv6 in its place.
                assert address[0] == host
