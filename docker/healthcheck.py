"""Exits 0 if the server in this container is ready for work."""

import http.client
import os
import sys

connection = http.client.HTTPConnection(
    # Where the server listens; to connect to 0.0.0.0 is to connect to this very machine.
    os.environ["NORMSERVE_HOST"],
    int(os.environ["NORMSERVE_PORT"]),
    timeout=3,
)
try:
    connection.request("GET", "/readyz")
    response = connection.getresponse()
    answer = response.read().decode(errors="replace").strip()
except OSError as error:
    sys.exit(f"no answer: {error}")
if response.status != http.client.OK:
    sys.exit(f"{response.status}: {answer}")
print(answer)
