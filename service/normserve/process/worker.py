"""One process of a fleet: `python -m normserve.process.worker CHANNEL`, which only `supervisor` starts.

Its settings and its place come pickled on standard input; connections come as descriptors over the channel, and
whether it is ready goes back.
"""

import pickle
import socket
import sys

from normserve.http.app import create_app
from normserve.logs.configuration import configure_logging
from normserve.peers.siblings import Siblings
from normserve.process.serving import serve


def main() -> int:
    """Serve; the exit code."""
    settings, place = pickle.load(sys.stdin.buffer)
    configure_logging(settings.log_level, settings.log_format, str(place.index))
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.setblocking(False)
    return serve(settings, create_app(settings, siblings=Siblings(place)), channel)


if __name__ == "__main__":
    sys.exit(main())
