"""The result of `patch`: the modules that it replaced, and those that it did not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_SHOWN = 3


@dataclass(frozen=True)
class PatchReport:
    """Every norm of a model, by its path within the model; a module in several places has its first path.

    Attributes:
        patched: for each patched module, the operation as which it is computed.
        skipped: for each module that was not patched, the reason.
        on_cpu: the number of patched modules with parameters on the CPU.
    """

    patched: dict[str, str]
    skipped: dict[str, str]
    on_cpu: int = 0

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"patched {len(self.patched)}, skipped {len(self.skipped)}"
        yield from _grouped("patched", self.patched)
        yield from _grouped("skipped", self.skipped)
        if self.on_cpu:
            yield f"on the CPU: {self.on_cpu} of the patched; torch computes them there, and nothing is gained"


def _grouped(title: str, entries: dict[str, str]) -> Iterator[str]:
    by_text: dict[str, list[str]] = {}
    for path, text in entries.items():
        by_text.setdefault(text, []).append(path or "(the model itself)")
    for text, paths in by_text.items():
        yield f"{title} {len(paths):>4}  {text}: {_shortened(paths)}"


def _shortened(paths: Iterable[str]) -> str:
    first, rest = (all_paths := list(paths))[:_SHOWN], len(all_paths) - _SHOWN
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")
