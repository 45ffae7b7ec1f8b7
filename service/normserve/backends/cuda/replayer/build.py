"""Compilation of the extension, once for each version of Python, with the compiler that Triton needs as well."""

import hashlib
import logging
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from fusednorm.host.extension_files import load_extension_module
from triton.runtime.cache import get_cache_manager

from normserve.backends.replay_interface import LaunchReplayer

log = logging.getLogger(__name__)

FOLDER = Path(__file__).with_name("extension")
"""The sources, one translation unit: `replayer.c` and the headers that are its parts."""

MODULE = "normserve_replayer"
_FILE = f"{MODULE}.so"
_COMPILER_S = 60.0


def make_gcc_command(target: Path) -> list[str]:
    """Make the gcc command that compiles the extension into the file `target`."""
    return [
        "gcc", "-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden",
        f"-I{sysconfig.get_paths()['include']}", str(FOLDER / "replayer.c"), "-o", str(target),
    ]  # fmt: skip


def load_extension() -> Callable[..., LaunchReplayer] | None:
    """Load the C extension and return its class `Replayer`, whose objects answer repeated requests.  If that fails,
    log a warning and return None.

    The extension is compiled first if it is not in the cache.
    """
    try:
        loaded: Callable[..., LaunchReplayer] = load_extension_module(_find_or_compile_extension(), MODULE).Replayer
    except (OSError, RuntimeError, ImportError, subprocess.TimeoutExpired) as error:
        log.warning("recurring requests of clients on this host are answered by Python code: %s", error)
        return None
    return loaded


def _find_or_compile_extension() -> str:
    """Return the path of the compiled extension in Triton's cache; compile it first if it is not there."""
    cache = get_cache_manager(_compute_cache_key())
    path: str | None = cache.get_file(_FILE)
    return path or str(cache.put(_compile_extension(), _FILE, binary=True))


def _compute_cache_key() -> str:
    sources = (f"{path.name}\n{path.read_text()}" for path in sorted(FOLDER.iterdir()))
    facts = (sys.implementation.cache_tag, platform.machine(), *make_gcc_command(Path()))
    return hashlib.sha256("\n".join((*sources, *map(str, facts))).encode()).hexdigest()


def _compile_extension() -> bytes:
    """Compile the extension in a temporary folder, and return the bytes of the shared library.

    Raises:
        RuntimeError: the compiler reports an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / _FILE
        done = subprocess.run(
            make_gcc_command(target), capture_output=True, text=True, check=False, timeout=_COMPILER_S
        )
        if done.returncode:
            raise RuntimeError(f"the extension does not compile:\n{done.stderr}")
        return target.read_bytes()
