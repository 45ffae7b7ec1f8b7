"""The files of the host extension, and its loading if it has been compiled."""

import os
import stat
from functools import cached_property
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from triton import knobs

from fusednorm.host.build import MODULE, compute_build_key
from fusednorm.host.compile_program import FAILED

FOLDER = "fusednorm-host"
"""The folder of compiled extensions in Triton's cache."""


class ExtensionFiles:
    """The files of the host extension that fits the installed versions.

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
        """Find the compiled extension, next to this module if the installation includes it; None if there is none.

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
        """Return the compiler's errors if it has failed for these versions; else an empty string."""
        try:
            return self.compiled.with_suffix(FAILED).read_text(errors="replace")
        except OSError:
            return ""

    def load_module(self) -> Any:
        """Load the extension's module; None if none was compiled.

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
    """Check that only this process's user and root can change the file or folder at a path.

    Raises:
        PermissionError: others can.
    """
    status = path.stat()
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_uid not in (0, os.geteuid()) or (status.st_mode & stat.S_IWOTH and not is_sticky):
        raise PermissionError(
            f"expected {path} to be writable by its user alone, and to belong to root or user {os.geteuid()}, got "
            f"mode {stat.filemode(status.st_mode)} of user {status.st_uid}: set TRITON_CACHE_DIR to your own folder"
        )


def load_extension_module(path: str, name: str) -> Any:
    """Load the module `name` from a compiled file.

    Raises: ImportError: it is none.
    """
    loader = ExtensionFileLoader(name, path)
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
