"""Keys of kernels in Triton's cache that are equal in every process.

Triton's key of a function includes the constants used by the functions it calls, but only of functions that were
hashed before, so processes that compile the same kernels in another order would not find each other's kernels
(Triton 3.6 and 3.7).  Here called functions are hashed first.
"""

import ast
from collections.abc import Iterator
from threading import RLock
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITFunction

# While one thread computes a key, other threads would treat the key as complete.
_SETTLING = RLock()


def store_stable_key(function: Any) -> None:
    """Make Triton compute and store a jit function's cache key, after the keys of all functions called in it.

    In this order the key is equal in every process.  Other values than jit functions are ignored.
    """
    if not isinstance(function, JITFunction):
        return
    with _SETTLING:
        if function.hash is None:
            for called in _iterate_called(function):
                if called is not function:
                    store_stable_key(called)
            _ = function.cache_key


def _iterate_called(function: Any) -> Iterator[Any]:
    for node in ast.walk(function.parse()):
        yield _try_resolve_name(node, function.__globals__)


def _try_resolve_name(node: ast.AST, names: dict[str, Any]) -> Any:
    """Return the object to which a name or `module.attribute` in a function's source refers; else None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        module = _try_resolve_name(node.value, names)
        return getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
    return None
