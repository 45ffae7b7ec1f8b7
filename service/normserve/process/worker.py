"""One process of several: `python -m normserve.process.worker CHANNEL`, started by `supervisor` only.

It reads its settings and its index, pickled, from standard input; connections arrive as descriptors over the
channel, over which it reports whether it is ready.
"""

import pickle
import signal
import socket
import sys

from normserve.http.app import create_app
from normserve.logs.formatting import configure_logging
from normserve.peers.sibling_processes import SiblingProcesses
from normserve.process.owner_server import run_server


def main() -> int:
    """Run a server that owns a device; return the exit code.  Standard input has the settings and the index, and
    the supervisor's channel the connections.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settings, place = pickle.load(sys.stdin.buffer)
    configure_logging(settings.log_level, settings.log_format, str(place.index))
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.setblocking(False)
    return run_server(settings, create_app(settings, siblings=SiblingProcesses(place)), channel)


if __name__ == "__main__":
    sys.exit(main())
