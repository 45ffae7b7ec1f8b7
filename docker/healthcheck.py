"""Exits 0 if the server in this container is ready for work: healthcheck.py [PATH], which is /readyz by default."""

import http.client
import os
import socket
import ssl
import sys

_WAIT_S = 3


def connection() -> http.client.HTTPConnection:
    """By the Unix socket if there is one, which asks for no certificate; else as the port wants it."""
    if path := os.environ.get("NORMSERVE_UDS"):
        local = http.client.HTTPConnection("localhost", timeout=_WAIT_S)
        local.sock = socket.socket(socket.AF_UNIX)
        local.sock.settimeout(_WAIT_S)
        local.sock.connect(path)
        return local
    # Where the server listens; to connect to 0.0.0.0 is to connect to this very machine.
    host, port = os.environ["NORMSERVE_HOST"], int(os.environ["NORMSERVE_PORT"])
    certificate = os.environ.get("NORMSERVE_TLS_CERT")
    if not certificate:
        return http.client.HTTPConnection(host, port, timeout=_WAIT_S)
    # The question is whether this server works; its certificate names it as others know it.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=_WAIT_S, context=context)


try:
    asked = connection()
    asked.request("GET", sys.argv[1] if len(sys.argv) > 1 else "/readyz")
    response = asked.getresponse()
    answer = response.read().decode(errors="replace").strip()
except OSError as error:
    sys.exit(f"no answer: {error}")
if response.status != http.client.OK:
    sys.exit(f"{response.status}: {answer}")
print(answer)
