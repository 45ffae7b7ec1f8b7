"""The command `normload`, with a one-line error if a dependency is not installed."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `normload` and return the exit code.  If a package is missing, print the command that installs it."""
    try:
        from normload.cli import main as run

        return run(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "normserve", "normload"):
            raise
        print(f"normload: {missing} is not installed: pip install 'normserve[load]'", file=sys.stderr)
        return 2
