"""A server that says any bytes at all, on real connections."""

import socket
import threading
from contextlib import suppress


class RawServer:
    """Plays a script on each connection, the last one for ever: bytes, or callables that take the socket."""

    def __init__(self, scripts, tls=None):
        self.tls = tls
        self.scripts = list(scripts)
        self.heads = []
        self.closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connected = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self):
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"

    def drip(self, piece=b"x"):
        """A step that says a piece every hundredth of a second until the client or the test has had enough."""

        def step(connected):
            while not self.closing.wait(0.01):
                connected.sendall(piece)

        return step

    def flood(self, piece=b"x" * 2**16):
        """A step that says a piece again and again, and counts how many bytes were taken."""
        self.taken = 0

        def step(connected):
            while not self.closing.is_set():
                connected.sendall(piece)
                self.taken += len(piece)

        return step

    def silence(self, _connected):
        """A step that says nothing more and closes nothing."""
        self.closing.wait(30)

    def close(self):
        self.closing.set()
        # Closing alone does not wake up who accepts.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connected in self._connected:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        assert not self._thread.is_alive()

    def _accept(self):
        with suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                self._connected.append(connected)
                script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
                threading.Thread(target=self._play, args=(connected, script), daemon=True).start()

    def _play(self, connected, script):
        with suppress(OSError):
            if self.tls:
                connected = self.tls.wrap_socket(connected, server_side=True)
            self._answer(connected, script)

    def _answer(self, connected, script):
        with connected:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connected.recv(2**16) or b"\r\n\r\n"
            self.heads.append(head)
            for step in script:
                if callable(step):
                    step(connected)
                else:
                    connected.sendall(step)
            # Until the client has read all: a close with bytes unread would take back what was sent.
            connected.shutdown(socket.SHUT_WR)
            while connected.recv(2**16):
                pass


def next_head(connected):
    """A step that waits for the next request's head and says whether it came."""
    head = b""
    while b"\r\n\r\n" not in head:
        piece = connected.recv(2**16)
        if not piece:
            return
        head += piece


def gone(connected):
    """A step that closes at once, whatever was not read."""
    connected.close()
