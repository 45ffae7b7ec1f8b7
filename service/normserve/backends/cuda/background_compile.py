"""Compilation of the warm-up's kernels in separate processes, in parallel with the rest of the start.

It imports neither torch nor fusednorm before `wait`: if nothing is compiled yet, those processes load them at
the same time as this one.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

_NOTES = "fusednorm-warm"
# Attributes of a device as the driver numbers them.
_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76
# Each kernel takes seconds at most, and a length has some forty kernels.
_PATIENCE_S = 300.0
# Takes Triton's hash while it imports torch.
_COMPILER = """
import sys, threading
from triton.runtime.cache import triton_key
hashing = threading.Thread(target=triton_key)
hashing.start()
from fusednorm.warm.__main__ import main
sys.exit(main(sys.argv[1:], hashing))
"""


class CompileTarget(NamedTuple):
    """The properties of a device for which kernels are compiled: its architecture and its number of
    multiprocessors.

    The architecture of compute capability 9.0 is 90.
    """

    arch: int
    multiprocessors: int


class BackgroundCompiler:
    """A compiler of the kernels for rows of `lengths`, which runs in other processes while this process starts.

    Kernels that are already in Triton's cache are not compiled.
    """

    def __init__(self, lengths: Collection[int]) -> None:
        self._lengths = lengths
        self._compiler: subprocess.Popen[bytes] | None = None
        self._preparing: threading.Thread | None = None

    def start(self) -> None:
        """Start to compile, in the background, kernels for those lengths that were not compiled before for the
        first CUDA device.

        Do nothing on a machine without a CUDA driver or Triton.
        """
        # A machine with a GPU may have torch's build for CPUs alone, and no Triton.
        if load_cuda_driver() is None or find_spec("triton") is None:
            return
        imported = threading.Event()
        self._preparing = threading.Thread(
            target=self._start_compiler_and_preload_triton, args=(imported,), daemon=True
        )
        self._preparing.start()
        try:
            # Imported by this thread, which imports torch next: two threads that import may wait for one another.
            import triton.backends.nvidia.driver
            import triton.runtime.cache  # noqa: F401
        finally:
            imported.set()

    def _start_compiler_and_preload_triton(self, imported: threading.Event) -> None:
        """Find the lengths to compile, start a process that compiles them, and load the parts of Triton that
        are needed later.

        Runs in a thread in parallel with imports, because most of this does not hold Python's lock.

        Args: imported: is set once the other thread has imported Triton's modules.
        """
        model = read_compile_target()
        if model is None:
            return
        cache, about = _find_triton_cache(), f"{model.arch}-{model.multiprocessors}"
        # A note of another version is taken for one of this: which it is `wait` sees.
        missing = [each for each in self._lengths if not any((cache / _NOTES).glob(f"{about}-{each}-*"))]
        if missing:
            self._try_start_compiler(model, missing, cache)
        imported.wait()
        with contextlib.suppress(Exception):  # The next use of these reports why they fail.
            from triton.backends.nvidia.driver import CudaUtils
            from triton.runtime.cache import triton_key

            # Every key in the cache has a hash of all of Triton: hundreds of megabytes.
            triton_key()
            # A module in C, compiled where it is not in the cache.
            CudaUtils()

    def wait(self, target: CompileTarget) -> None:
        """Wait until the kernels of all lengths are compiled, for a limited time; missing ones are compiled at
        their first use.
        """
        from fusednorm.warm.compile_records import is_compiled
        from triton import knobs

        self._join_preparation()
        missing = [length for length in self._lengths if not is_compiled(*target, length, only_warm_up=True)]
        if not missing:
            self.stop()
            return
        if self._compiler is None:
            self._try_start_compiler(target, missing, Path(knobs.cache.dir))
        if self._compiler is None:
            return
        began = time.perf_counter()
        try:
            code = self._compiler.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            log.warning("compiling ahead takes longer than %g s and is given up", _PATIENCE_S)
            self.stop()
            return
        if code:
            log.warning("compiling ahead ended with %d: what is missing is compiled when it is needed", code)
        log.info("waited %.1f s for kernels to be compiled", time.perf_counter() - began)

    def stop(self) -> None:
        """Kill the compiling processes, because their kernels are not needed or they take too long."""
        self._join_preparation()
        if self._compiler is not None and self._compiler.poll() is None:
            # With all that it has started: they are a session.
            os.killpg(self._compiler.pid, signal.SIGKILL)
            self._compiler.wait()

    def _join_preparation(self) -> None:
        if self._preparing is not None:
            self._preparing.join()

    def _try_start_compiler(self, target: CompileTarget, lengths: Collection[int], cache: Path) -> None:
        """Start a process that compiles the kernels for rows of `lengths`; do nothing if Triton's cache is not
        writable.
        """
        if not _is_writable(cache):
            return
        log.info("compiling kernels for rows of %s", ", ".join(map(str, lengths)))
        self._compiler = subprocess.Popen(
            make_compiler_command(target, lengths),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # A terminal's interrupt is for this process, without which those end.
            start_new_session=True,
        )


def make_compiler_command(target: CompileTarget, lengths: Collection[int]) -> Sequence[str]:
    """Make the command that compiles ahead for a device."""
    return (
        *(sys.executable, "-c", _COMPILER, "--only-warm-up"),
        *("--arch", str(target.arch), "--multiprocessors", str(target.multiprocessors)),
        *("--lengths", ",".join(map(str, lengths)), "--until-gone", str(os.getpid())),
    )


def load_cuda_driver() -> ctypes.CDLL | None:
    """Load the driver's library without initialising it; None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def read_compile_target() -> CompileTarget | None:
    """Read the first CUDA device's properties from the driver, without creating a context; None if there
    is no device.
    """
    cuda = load_cuda_driver()
    device = ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None

    def read_attribute(attribute: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        return value.value

    return CompileTarget(10 * read_attribute(_MAJOR) + read_attribute(_MINOR), read_attribute(_MULTIPROCESSORS))


def _find_triton_cache() -> Path:
    """Return the path of Triton's cache folder by Triton's own rules, without importing Triton, which is slow."""
    environment = os.environ  # noqa: TID251
    if folder := environment.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(environment.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def _is_writable(folder: Path) -> bool:
    """Return whether this process can create files in a folder; a missing folder is judged by its nearest
    parent.
    """
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)
