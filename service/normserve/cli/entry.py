"""The command `normserve`.  If a package is missing, it prints one line with the command that installs it."""

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `normserve` and return the exit code.  If a package is missing, print the command that installs it."""
    # A server is never ended by it, not even while its modules are imported.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        from normserve.cli.commands import main as run

        return run(arguments)
    except ModuleNotFoundError as error:
        missing, _, module = (error.name or "").partition(".")
        # The server needs the package fusednorm; that a module of it is missing is a fault.
        if missing in ("", "normserve") or (missing == "fusednorm" and module):
            raise
        extra = "grpc" if missing in ("grpc", "google") else "server"
        print(f"normserve: {missing} is not installed: pip install 'normserve[{extra}]'", file=sys.stderr)
        return 2
