"""Calls after another module's import, for what a module can only do once that one is there."""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def call_after_import(module: str, action: Callable[[], object]) -> None:
    """Call a function once a module has been imported: at once if it has been, else at the end of its import.

    The module's spec and loader remain those of the finder that finds it; only the loader's `exec_module` is
    wrapped.  If the import fails, the next one is waited for.

    Args:
        module: the name of a top-level module, which need not be installed.
        action: the function; a second call of it must do nothing.
    """
    if sys.modules.get(module) is None:
        sys.meta_path.insert(0, _ImportHook(module, action))
    else:
        action()


class _ImportHook:
    """A finder that calls a function after a module's import, and leaves the search to the finders after it."""

    def __init__(self, module: str, action: Callable[[], object]) -> None:
        self._module, self._action = module, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            # Python passes over finders without it, too.
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    # Assigned by name: to type checkers it is a method, which nobody assigns.
                    setattr(spec.loader, "exec_module", self._call_after(spec.loader.exec_module))  # noqa: B010
                return spec
        return None

    def _call_after(self, exec_module: Callable[[ModuleType], Any]) -> Callable[[ModuleType], None]:
        """Wrap a loader's function that executes a module."""

        @wraps(exec_module)
        def exec_module_and_call(module: ModuleType) -> None:
            exec_module(module)
            # A finder may have one loader for all of its modules.
            if module.__name__ == self._module and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._action()

        return exec_module_and_call
