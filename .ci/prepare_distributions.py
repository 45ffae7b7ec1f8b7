"""Prepares a copy of the repository for the builds of its distributions.

The folder of the kernels gets their tests and the documents: a source distribution has nothing from outside of its
folder.  With the address of the repository each project gets URLs, and the links of the READMEs, an index's pages,
become absolute: they lead to the files of the version's tag.  It prints the folders to build.

Usage: prepare_distributions.py FOLDER VERSION [ADDRESS]
"""

import posixpath
import re
import shutil
import sys
from pathlib import Path

PROJECTS = ("kernels", "kernels/with-torch", ".")
"""Folders with a pyproject.toml, from the root of the repository."""

_PAGES = ("README.md", "kernels/README.md", "kernels/with-torch/README.md")
_TARGET = re.compile(r"(!\[[^\]]*)?\]\(([^()\s]+)\)")
_CODE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def main(folder: str, version: str, address: str = "") -> None:
    root = Path(folder)
    add_tests_and_documents(root)
    if address:
        for name in PROJECTS:
            path = root / name / "pyproject.toml"
            path.write_text(path.read_text(encoding="utf-8") + make_urls(address, version), encoding="utf-8")
        for name in _PAGES:
            path = root / name
            text = make_links_absolute(path.read_text(encoding="utf-8"), posixpath.dirname(name), address, version)
            path.write_text(text, encoding="utf-8")
    print(*PROJECTS, sep="\n")


def add_tests_and_documents(root: Path) -> None:
    """Copy the tests of the kernels, the modules that all tests share, and the documents."""
    tests = root / "kernels" / "tests"
    for name in ("jax", "kernels"):
        shutil.copytree(root / "tests" / name, tests / name)
    for path in (root / "tests").glob("*.py"):
        shutil.copy(path, tests)
    shutil.copytree(root / "docs", root / "kernels" / "docs")


def make_urls(address: str, version: str) -> str:
    """Return the table of pyproject.toml that has a project's URLs."""
    files = f"{address}/blob/v{version}"
    urls = {
        "Changelog": f"{files}/CHANGELOG.md",
        "Documentation": f"{files}/docs/index.md",
        "Issues": f"{address}/issues",
        "Repository": address,
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items())


def make_links_absolute(markdown: str, folder: str, address: str, version: str) -> str:
    """Make the links from a page to files lead to these files in the repository.

    Args:
        folder: the page's, from the root of the repository; empty for the root.
    """

    def replace(link: re.Match[str]) -> str:
        image, target = link.groups(default="")
        if not re.match(r"\w+:|#", target):
            view = "raw" if image else "blob"
            target = f"{address}/{view}/v{version}/{posixpath.normpath(posixpath.join(folder, target))}"
        return f"{image}]({target})"

    parts = _CODE.split(markdown)
    return "".join(part if number % 2 else _TARGET.sub(replace, part) for number, part in enumerate(parts))


if __name__ == "__main__":
    main(*sys.argv[1:])
