"""Files in Triton's cache which record that all kernels of a row length have been compiled.

Looking for the kernels themselves would require planning each call and hashing its sources.  A record's key
contains the library's sources, Triton's version and the environment variables that affect compilation.  If a
record is wrong, for example because kernels were deleted from the cache, they are compiled when they are first
used.
"""

import functools
import hashlib
import os
from pathlib import Path

import torch
import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars

import fusednorm

FOLDER = "fusednorm-warm"
"""The folder of the records in Triton's cache."""


def is_compiled(arch: int, multiprocessors: int, length: int, only_warm_up: bool) -> bool:
    """Return whether all kernels were compiled for such a GPU and this row length."""
    enough = (True, False) if only_warm_up else (False,)
    return any(_make_record_path(arch, multiprocessors, length, each).exists() for each in enough)


def record_compiled(arch: int, multiprocessors: int, length: int, only_warm_up: bool) -> None:
    """Record that all kernels for such a GPU and row length were compiled, so that `is_compiled` returns True.

    Args:
        arch, multiprocessors: the GPU's compute capability, as 90 for 9.0, and its number of
            multiprocessors.
        length: the number of elements of a row.
        only_warm_up: whether only the kernels of a server's warm-up were compiled.

    Raises:
        OSError: Triton's cache cannot be written to.
    """
    path = _make_record_path(arch, multiprocessors, length, only_warm_up)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def prepare_lock_path() -> Path:
    """Create the folder of a lock file and return the file's path; a process that compiles in advance locks it.

    The lock keeps other processes from compiling the same kernels.
    """
    folder = Path(knobs.cache.dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "lock"


def _make_record_path(arch: int, multiprocessors: int, length: int, only_warm_up: bool) -> Path:
    versions = hashlib.sha256(f"{_describe_versions()} {only_warm_up}".encode()).hexdigest()
    return Path(knobs.cache.dir) / FOLDER / f"{arch}-{multiprocessors}-{length}-{versions}"


@functools.cache
def _describe_versions() -> str:
    """Describe in one text the sources, versions and environment variables on which compiled kernels depend.

    The text is equal in every process of an installation.
    """
    sources = hashlib.sha256()
    for folder, _, names in sorted(os.walk(Path(fusednorm.__file__).parent)):
        for name in sorted(names):
            if name.endswith(".py"):
                sources.update(Path(folder, name).read_bytes())
    environment = sorted(get_cache_invalidating_env_vars().items())
    return f"{sources.hexdigest()} {triton.__version__} {torch.__version__} {environment}"
