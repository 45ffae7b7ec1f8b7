"""Loading of the host extension, if it has been compiled."""

from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

from triton.runtime.cache import get_cache_manager

from fusednorm.host.build import MODULE, key

_FILE = f"{MODULE}.so"


def keep(extension: bytes) -> str:
    """Store a compiled extension where `load` finds it; returns its path."""
    path: str = get_cache_manager(key()).put(extension, _FILE, binary=True)
    return path


def load() -> Any:
    """The extension's module, or None if none was compiled for the installed versions."""
    path = get_cache_manager(key()).get_file(_FILE)
    return None if path is None else module_at(path, MODULE)


def module_at(path: str, name: str) -> Any:
    """The module of that name that was compiled to a file.

    Raises: ImportError: it is none.
    """
    loader = ExtensionFileLoader(name, path)
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
