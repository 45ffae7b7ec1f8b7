"""The result of `patch`: the modules that it replaced, and those that it did not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

_SHOWN = 3
_NO_MODEL = (
    "PatchReport {}: patch changes the model in place and returns a report, so write `fusednorm.patch(model)` "
    "instead of `model = fusednorm.patch(model)`"
)


@dataclass(frozen=True)
class PatchReport:
    """Result of `patch`: the modules of a model that were patched or skipped, by their paths.

    A norm is a module whose class is a norm or is named like one, or whose forward calls a norm's function.
    A module with several paths has its first path.  `str(report)` is a summary for people.

    Attributes:
        patched: for each patched module, the operation as which it is computed.
        skipped: for each module that was not patched, the reason.
        on_cpu: the number of patched modules with parameters on the CPU; default 0.
        calls: how this process makes repeated calls on a GPU, and why; empty (default) without Triton.

    Examples:
        >>> import torch, fusednorm
        >>> report = fusednorm.patch(torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Tanh()))
        >>> list(report.patched), report.skipped, report.on_cpu
        (['0'], {}, 1)
    """

    patched: dict[str, str]
    skipped: dict[str, str]
    on_cpu: int = 0
    calls: str = ""

    def __str__(self) -> str:
        return "\n".join(self._format_lines())

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(_NO_MODEL.format("is not callable"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(_NO_MODEL.format(f"has no attribute {name!r}"))

    def _format_lines(self) -> Iterator[str]:
        """Yield the lines of `str(report)`; the text `calls` is last, unless all patched modules are on the CPU."""
        yield f"patched {len(self.patched)}, skipped {len(self.skipped)}"
        yield from _format_groups("patched", self.patched)
        yield from _format_groups("skipped", self.skipped)
        if self.on_cpu:
            yield f"on the CPU: {self.on_cpu} of the patched; torch computes them there, and nothing is gained"
        if self.calls and self.on_cpu < len(self.patched):
            yield self.calls


def _format_groups(title: str, entries: dict[str, str]) -> Iterator[str]:
    """Yield one line for each distinct text: the number of paths that have the text, and the first path."""
    by_text: dict[str, list[str]] = {}
    for path, text in entries.items():
        by_text.setdefault(text, []).append(path or "(the model itself)")
    for text, paths in by_text.items():
        yield f"{title} {len(paths):>4}  {text}: {_shorten_paths(paths)}"


def _shorten_paths(paths: Iterable[str]) -> str:
    first, rest = (all_paths := list(paths))[:_SHOWN], len(all_paths) - _SHOWN
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")
