"""The build of the host extension by one process of a host at a time, in the background or in a waiting process."""

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from fusednorm.host import compile_program
from fusednorm.host.extension_files import ExtensionFiles, check_owner, is_accessible, make_compiler_command

SWITCH = "FUSEDNORM_BUILD_EXTENSION"
"""The environment variable that disables builds in the background if it is 0."""

_REMEDY = "install g++ and the missing headers, and run python -m fusednorm.host"

log = logging.getLogger(__name__)


class BackgroundBuild:
    """A build of the host extension in the background, by a separate process at low priority.

    That process has its own session and inherits no open file but the lock, so that neither process waits
    for the end of the other.  The lock keeps other processes from starting a build meanwhile.

    Args:
        files: where the extension is stored.
        compile_by: returns the compiler's command line.
    """

    def __init__(self, files: ExtensionFiles, compile_by: Callable[[], list[str]] = make_compiler_command) -> None:
        self._files = files
        self._command = compile_by
        self._builder: subprocess.Popen[bytes] | None = None
        self._has_ended = False

    def is_running(self) -> bool:
        """Return whether a compiler process that this process has started is running."""
        return self._builder is not None and self._builder.poll() is None

    def start_if_needed(self) -> None:
        """Start the compiler process, unless a build has failed or is disabled, or another process compiles.

        Returns immediately.  Call the method again until the extension exists; it logs at most once why it will
        not exist.
        """
        if self._has_ended or self.is_running():
            return
        if self._builder is not None or self._files.read_failure():
            self._has_ended = True
            self._log_failure()
        elif not is_build_enabled():
            self._has_ended = True
        else:
            try:
                self._builder = self._start_compiler()
            except OSError as error:
                self._has_ended = True
                log.info("the host extension is not compiled: %s", error)

    def _log_failure(self) -> None:
        """Log that the build failed: as a warning if this process started the build, else as information.

        A compiler process that ended without a result is logged as information, too.
        """
        if self._files.read_failure():
            level = logging.INFO if self._builder is None else logging.WARNING
            log.log(level, "calls cost more host time: %s", explain_absence(self._files))
        else:
            log.info("the process that compiles the host extension was ended: the next process starts another")

    def _start_compiler(self) -> subprocess.Popen[bytes] | None:
        """Start the compiler process and return it; None if another process compiles, or has just compiled.

        Raises:
            OSError: the folder cannot be written to, or others can write to it; headers are missing; or no process
                can be started.
        """
        with _open_lock(self._files) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if self._files.find_compiled() is not None or self._files.read_failure():
                return None
            program = [sys.executable or "python3", "-I", compile_program.__file__, str(self._files.compiled)]
            # The process inherits the lock and holds it to its end.
            return subprocess.Popen(
                [*program, *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(lock.fileno(),),
                cwd="/",
                start_new_session=True,
            )


def ensure_extension_built(
    files: ExtensionFiles | None = None, compile_by: Callable[[], list[str]] = make_compiler_command
) -> Path:
    """Return the path of the compiled extension, which is compiled first if it does not exist.

    If another process compiles, wait for that process.

    Raises:
        RuntimeError: there is no compiler, or it failed; the message is the compiler's.
        OSError: the folder cannot be written to, or others can write to it; or headers are missing.
    """
    files = files or ExtensionFiles()
    found = files.find_compiled()
    if found is None:
        with _open_lock(files) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = files.find_compiled()
            if found is None:
                compile_program.compile_library(files.compiled, compile_by())
                found = files.compiled
    return found


def explain_absence(files: ExtensionFiles) -> str:
    """Explain in a sentence why there is no compiled extension, and whether or when there will be one."""
    failure = files.read_failure()
    if failure:
        lines = failure.splitlines()
        error = next((line for line in lines if "error:" in line), lines[0])
        return f"the host extension does not compile ({error.strip()}): {_REMEDY}"
    if _is_locked(files.lock):
        return "the host extension is being compiled"
    if not is_build_enabled():
        return f"the host extension is not compiled, and {SWITCH} is {os.environ[SWITCH]}"
    existing = next(path for path in (files.folder, *files.folder.parents) if is_accessible(path))
    if not os.access(existing, os.W_OK):
        return f"the host extension is not compiled, and {existing} cannot be written to"
    return "the host extension is not compiled yet, which happens after the first launches on a GPU"


def is_build_enabled() -> bool:
    """Return whether the extension may be built in the background."""
    return os.environ.get(SWITCH, "").lower() not in ("0", "false", "no", "off")


def _open_lock(files: ExtensionFiles) -> IO[bytes]:
    """Open the lock file of the build for writing; create its folder first.

    Raises:
        OSError: the folder cannot be written to, or others can write to it.
    """
    files.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for folder in (files.folder, files.folder.parent):
        check_owner(folder)
    return files.lock.open("wb")


def _is_locked(path: Path) -> bool:
    """Return whether another process holds the lock file, and thus compiles; False if there is no such file."""
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
