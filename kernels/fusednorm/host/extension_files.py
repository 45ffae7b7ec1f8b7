"""The host extension's files: the key and the compiler command of a build, the compiled file and its loading.

A compiled file is for the installed versions of torch and Python: a hash of these versions and of the sources is
part of its name.
"""

import hashlib
import os
import platform
import stat
import sysconfig
from functools import cached_property
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from fusednorm.host.compile_program import FAILED

SOURCE_FOLDER = Path(__file__).with_name("extension")
"""The folder of the sources, one translation unit: `extension.cpp` and the headers that are its parts."""

MODULE = "fusednorm_host"

FOLDER = "fusednorm-host"
"""The folder of compiled extensions in Triton's cache."""


class ExtensionFiles:
    """The files of the host extension for the installed versions of torch and Python.

    Attributes:
        folder: in Triton's cache as it is now: torch's compiler moves that when it is first used.
    """

    def __init__(self) -> None:
        self.folder = (Path(knobs.cache.dir) / FOLDER).absolute()

    @cached_property
    def compiled(self) -> Path:
        """The path of the extension in Triton's cache; its name has the key of its build, so versions coexist."""
        return self.folder / f"{compute_build_key()}.so"

    @property
    def lock(self) -> Path:
        """The file that a process locks while it compiles."""
        return self.folder / "lock"

    def find_compiled(self) -> Path | None:
        """Find the compiled extension: in the installed package, or else in the cache; None if there is none.

        Raises:
            PermissionError: other users may have written it.
        """
        installed = Path(__file__).with_name(self.compiled.name)
        if is_accessible(installed):
            return installed
        if not is_accessible(self.compiled):
            return None
        for path in (self.compiled, self.folder, self.folder.parent):
            check_owner(path)
        return self.compiled

    def read_failure(self) -> str:
        """Read the errors of a failed build for the installed versions; an empty string if none has failed."""
        try:
            return self.compiled.with_suffix(FAILED).read_text(errors="replace")
        except OSError:
            return ""

    def try_load_compiled_module(self) -> Any:
        """Import the compiled extension; None if it has not been compiled.

        This method never compiles.

        Raises:
            ImportError: it is for other libraries than the installed ones.
            PermissionError: other users may have written it.
        """
        path = self.find_compiled()
        return None if path is None else load_extension_module(str(path), MODULE)


def is_accessible(path: Path) -> bool:
    """Return whether a file or folder exists and is visible to this process."""
    return os.access(path, os.F_OK)


def check_owner(path: Path) -> None:
    """Raise PermissionError unless a file or folder belongs to root or to the user of this process.  Also raise it
    if every user can write to a file, or to a folder without the sticky bit.

    Write permission of the owning group is not checked.

    Raises:
        PermissionError: it belongs to another user, or every user can write to it.
    """
    status = path.stat()
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.geteuid()) or (status.st_mode & stat.S_IWOTH and not is_sticky):
        raise PermissionError(
            f"expected {path} to be writable by its user alone, and to belong to root or user {os.geteuid()}, got "
            f"mode {stat.filemode(status.st_mode)} of user {status.st_uid}: set TRITON_CACHE_DIR to your own folder"
        )


def load_extension_module(path: str, name: str) -> Any:
    """Import a compiled file as the module `name`, without an entry in sys.modules.

    Raises: ImportError: it is none.
    """
    loader = ExtensionFileLoader(name, path)
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def compute_build_key() -> str:
    """Compute the key in the name of a compiled extension: a hash of its sources and of the installed versions.

    The versions are those of torch, Python and the C library.
    """
    sources = (f"{path.name}\n{path.read_text()}" for path in sorted(SOURCE_FOLDER.iterdir()) if path.is_file())
    # SOABI distinguishes versions of Python, builds with and without its lock, and C libraries.
    facts = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"), platform.machine())
    return hashlib.sha256("\n".join((*sources, *map(str, facts))).encode()).hexdigest()


def make_compiler_command() -> list[str]:
    """Make the compiler's command line that builds the extension, without the output file.

    Raises:
        FileNotFoundError: torch's or Triton's headers are missing.
    """
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("Triton is not installed: its headers of the CUDA driver are needed")
    torch_root = Path(torch.__file__).parent
    includes = [
        torch_root / "include",
        torch_root / "include" / "torch" / "csrc" / "api" / "include",
        Path(spec.origin).parent / "backends" / "nvidia" / "include",
        Path(sysconfig.get_paths()["include"]),
    ]
    libraries = ["torch_python", "torch", "torch_cpu", "c10"]
    options = []
    if torch.version.cuda:
        includes += _find_cuda_includes(torch_root.parent)
        libraries += ["torch_cuda", "c10_cuda"]
        options.append("-DWITH_CUDA")
    return [
        "g++", "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", *options,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in includes), str(SOURCE_FOLDER / "extension.cpp"),
        f"-L{torch_root / 'lib'}", *(f"-l{name}" for name in libraries),
    ]  # fmt: skip


def _find_cuda_includes(packages: Path) -> list[Path]:
    """Find the folders that have the CUDA runtime's headers: those of wheels next to torch, or of a toolkit."""
    candidates = [*packages.glob("nvidia/*/include"), Path("/usr/local/cuda/include")]
    return [path for path in candidates if (path / "cuda_runtime_api.h").exists()]
