"""Loading of the host extension, if it has been compiled."""

from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

from triton.runtime.cache import get_cache_manager

from fusednorm.host.build import MODULE, key

_FILE = f"{MODULE}.so"


def keep(extension: bytes) -> str:
    """Put a compiled extension where `load` finds it, and say where that is."""
    path: str = get_cache_manager(key()).put(extension, _FILE, binary=True)
    return path


def load() -> Any:
    """The extension's module, None where none was compiled for what is installed here."""
    path = get_cache_manager(key()).get_file(_FILE)
    if path is None:
        return None
    loader = ExtensionFileLoader(MODULE, path)
    spec = spec_from_loader(MODULE, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
