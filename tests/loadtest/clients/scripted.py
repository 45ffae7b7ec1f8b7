"""A socket that says what it is told to."""

import socket
import threading

from normload.clients.http_connection import HttpLoadConnection
from normserve.client.http.server_address import ServerAddress


class Scripted:
    """Accepts connections one after another and plays a script on each: callables that take the socket."""

    def __init__(self, *scripts):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.accepted = 0
        self.received = []
        self._scripts = scripts
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def connection(self, timeout_s=5.0):
        host, port = self.listener.getsockname()
        return HttpLoadConnection(ServerAddress(host, port), timeout_s)

    def _serve(self):
        for script in self._scripts:
            connected, _ = self.listener.accept()
            self.accepted += 1
            with connected:
                for step in script:
                    step(connected, self.received)
        self.listener.close()

    def join(self):
        self._thread.join(5)
        assert not self._thread.is_alive()


def takes(nbytes):
    def step(connected, received):
        data = b""
        while len(data) < nbytes and (piece := connected.recv(nbytes - len(data))):
            data += piece
        received.append(data)

    return step


def says(*pieces):
    def step(connected, _received):
        for piece in pieces:
            connected.sendall(piece)

    return step


def drains(connected, received):
    received.append(b"".join(iter(lambda: connected.recv(2**16), b"")))


def ends(connected, _received):
    connected.recv(1)
