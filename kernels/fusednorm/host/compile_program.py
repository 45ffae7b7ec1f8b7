"""A program that compiles one shared library: at low priority, by Python's standard library alone.

Other processes find the library, or the record of a failure in its place.  The program is started by its path with
the arguments TARGET COMMAND..., so that it imports neither torch nor this package.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

FAILED = ".failed"
"""The suffix of the file that records a failure, in place of the library's suffix."""

_MAX_FAILURE = 20_000


def compile_library(target: Path, command: list[str]) -> None:
    """Run a compiler and move the library that it makes to `target`.  If the compiler fails, write its errors to a
    file beside `target`, and raise.

    Args:
        command: the compiler's command line without `-o`.

    Raises:
        RuntimeError: there is no compiler, or it failed; the message is the compiler's.
        OSError: the folder cannot be written to.
    """
    failed = target.with_suffix(FAILED)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / target.name
        error = _run_compiler([*command, "-o", str(library)])
        if error:
            failed.write_text(error[-_MAX_FAILURE:])
            raise RuntimeError(error)
        # A process that loads the library finds the complete file, or none.
        partial = target.with_suffix(".partial")
        partial.write_bytes(library.read_bytes())
        partial.chmod(0o644)
        partial.replace(target)
    failed.unlink(missing_ok=True)


def _run_compiler(command: list[str]) -> str:
    """Run a compiler and return the text of its errors; an empty string if it succeeded."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        return f"error: there is no compiler {command[0]}"
    return (done.stderr.strip() or f"error: exit code {done.returncode}") if done.returncode else ""


def _lower_priority() -> None:
    """Give this process and its compiler the lowest CPU priority, and let the OOM killer prefer them."""
    os.nice(19)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    _lower_priority()
    with suppress(RuntimeError, OSError):
        compile_library(Path(sys.argv[1]), sys.argv[2:])
