"""How the source is laid out: `python -m tests.layout` prints it.

Entries of each folder, words of file names, lines of files, and the longest chain of imports of each package.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "fusednorm": ROOT / "kernels" / "fusednorm",
    "normserve": ROOT / "service" / "normserve",
    "normload": ROOT / "loadtest" / "normload",
}
FOLDERS = (*PACKAGES.values(), ROOT / "benchmarks", ROOT / "tests")
_NO_ENTRIES = {"__init__.py", "__pycache__", "py.typed", "results", "corpus"}


def folders() -> dict[str, int]:
    """Entries of each folder with Python files, without what every package has."""
    found = {}
    for top in FOLDERS:
        for folder in (top, *(path for path in top.rglob("*") if path.is_dir())):
            entries = [path for path in folder.iterdir() if path.name not in _NO_ENTRIES]
            if any(path.suffix == ".py" for path in entries):
                found[str(folder.relative_to(ROOT))] = len(entries)
    return found


def files() -> Iterator[Path]:
    """Every Python file of the source roots, the benchmarks and the tests."""
    for top in FOLDERS:
        yield from sorted(path for path in top.rglob("*.py") if "node_modules" not in path.parts)


def words(path: Path) -> int:
    """Of a file's name."""
    return len([word for word in path.stem.split("_") if word])


def lines(path: Path) -> int:
    """Of a file."""
    return len(path.read_text().splitlines())


def imports(package: str) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports, wherever in the file."""
    top = PACKAGES[package]
    modules = {_name(package, top, path): path for path in top.rglob("*.py")}
    return {name: set(_imported(path, modules)) - {name} for name, path in modules.items()}


def longest_chain(package: str) -> list[str]:
    """Modules each of which imports the next, the most there are."""
    graph = imports(package)

    @cache
    def chain(module: str) -> tuple[str, ...]:
        return (module, *max((chain(each) for each in sorted(graph[module])), key=len, default=()))

    return list(max((chain(module) for module in sorted(graph)), key=len))


def _name(package: str, top: Path, path: Path) -> str:
    parts = path.relative_to(top).with_suffix("").parts
    return ".".join((package, *(part for part in parts if part != "__init__")))


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module


def main() -> None:
    """Print it."""
    print("entries  folder")
    for folder, count in sorted(folders().items(), key=lambda item: -item[1]):
        print(f"{count:7}  {folder}")
    print("\nlines  file")
    for path in sorted(files(), key=lines, reverse=True)[:20]:
        print(f"{lines(path):5}  {path.relative_to(ROOT)}")
    print("\nwords  file")
    for path in sorted(files(), key=words, reverse=True)[:20]:
        print(f"{words(path):5}  {path.relative_to(ROOT)}")
    for package in PACKAGES:
        chain = longest_chain(package)
        print(f"\n{package}: {len(chain)} modules, each of which imports the next\n  " + "\n  ".join(chain))


if __name__ == "__main__":
    main()
