"""Who connected, which users may, and as whom; and when their process has ended."""

import contextlib
import os
import select
import socket
import subprocess
import sys

import pytest
from normserve.errors import ForbiddenError
from normserve.local import local_session as peer_module
from normserve.local.local_session import AllowedLocalUsers, PeerProcess

OWN = os.geteuid()
# Of sockets, that no kernel has.
NO_OPTION = 2**15


def test_the_servers_own_user_is_always_admitted():
    users = AllowedLocalUsers("")
    assert users.find_key_name(OWN) is None
    assert not users.has_other_users
    with pytest.raises(ForbiddenError):
        users.find_key_name(OWN + 1)


def test_listed_users_have_their_keys():
    users = AllowedLocalUsers(f"{OWN + 1},{OWN + 2}=batch")
    assert users.has_other_users
    assert [users.find_key_name(OWN + number) for number in range(3)] == [None, None, "batch"]
    with pytest.raises(ForbiddenError, match="local-users"):
        users.find_key_name(OWN + 3)


def test_users_without_a_number_here_are_never_admitted():
    with pytest.raises(ForbiddenError):
        AllowedLocalUsers("65534").find_key_name(65534)


def test_a_peer_is_the_process_that_connected():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert PeerProcess.from_socket(ours) == PeerProcess(os.getpid(), OWN)


def test_what_is_no_unix_socket_has_no_peer():
    with socket.socket(socket.AF_INET) as strange:
        told = PeerProcess.from_socket(strange)
        assert told.pid == 0
        # All ones is no user: neither the server's own, nor one that may be listed.
        assert told.uid == 2**32 - 1
        with pytest.raises(ForbiddenError):
            AllowedLocalUsers("").find_key_name(told.uid)


def test_a_closed_connection_has_no_peer():
    ours, theirs = socket.socketpair()
    ours.close()
    theirs.close()
    with pytest.raises(OSError, match="descriptor"):
        PeerProcess.from_socket(ours)


@pytest.mark.parametrize("by_socket", [True, False])
def test_a_watch_can_be_read_once_the_process_has_ended(by_socket, tmp_path, monkeypatch):
    if not by_socket:
        monkeypatch.setattr(peer_module, "_SO_PEERPIDFD", NO_OPTION)
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with connecting_process(path) as process:
            connected, _ = listener.accept()
            with connected:
                peer = PeerProcess.from_socket(connected)
                assert peer.pid == process.pid
                watch = peer.open_exit_descriptor(connected)
                try:
                    assert not os.get_inheritable(watch)
                    assert not ended(watch, 0)
                    process.kill()
                    assert ended(watch, 20)
                finally:
                    os.close(watch)


def test_a_process_is_watched_that_has_closed_the_connection():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        watch = PeerProcess.from_socket(ours).open_exit_descriptor(ours)
        assert not ended(watch, 0)
        os.close(watch)


@pytest.mark.parametrize("number", [0, "gone"])
def test_where_the_kernel_tells_no_process_one_without_a_number_cannot_be_watched(number, monkeypatch):
    monkeypatch.setattr(peer_module, "_SO_PEERPIDFD", NO_OPTION)
    if number == "gone":
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait(20)
        number = process.pid
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert PeerProcess(number, OWN).open_exit_descriptor(ours) is None


def ended(watch, timeout_s):
    return bool(select.select([watch], [], [], timeout_s)[0])


@contextlib.contextmanager
def connecting_process(path):
    """A process that connects and waits."""
    program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"
    process = subprocess.Popen([sys.executable, "-c", program, path])
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)
