"""The documents with rendered parts, and the rendering of such a part from its template.

A part is between two comments, of which the first names its template:

    <!-- figures: models.md -->
    <!-- end of figures -->

Templates are Jinja: `{{ … }}` contains a query of `benchmarks.report.figures`, and no figure is anywhere else
(`benchmarks.report.literal_figures`).  Paragraphs are wrapped after rendering, since a query is longer than its
figure.
"""

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.harness import records
from benchmarks.report import figures, kernel_tables, result_files

ROOT = Path(__file__).parents[2]
TEMPLATES = Path(__file__).parent / "templates"

DOCUMENTS = (
    "README.md",
    "docs/client.md",
    "docs/coming-from-triton.md",
    "docs/deploying/front-ends.md",
    "docs/deploying/images.md",
    "docs/deploying/ray.md",
    "docs/deploying/sizing.md",
    "docs/deploying/tls-and-keys.md",
    "docs/jax.md",
    "docs/kernel-limits.md",
    "docs/load-testing.md",
    "docs/local.md",
    "docs/patching.md",
    "docs/performance.md",
    "benchmarks/results/README.md",
    "benchmarks/results/group_norm.md",
    "benchmarks/results/h100.md",
    "benchmarks/results/layer_norm.md",
    "benchmarks/results/models.md",
)
"""Paths from the root of the repository."""

PART = re.compile(
    r"(?P<begin><!-- figures: (?P<template>\S+) [^\n]*-->\n)(?P<text>.*?)(?P<end><!-- end of figures -->\n)",
    re.DOTALL,
)

_WIDTH = 120
_NOT_PROSE = re.compile(r"\||#|!\[|<!--|    |```|$")
_ITEM = re.compile(r"( *- )(.*)", re.DOTALL)


class DocumentRenderer:
    """Renders templates, whose queries read CSVs once."""

    def __init__(self) -> None:
        # Not HTML: the output is Markdown of this repository.
        self._environment = Environment(
            loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self._environment.globals.update(
            load_rows=figures.load_rows,
            compare_with_peers=figures.compare_with_peers,
            compute_differences=figures.compute_differences,
            pair=lambda rows: kernel_tables.format_pair(rows.rows),
            tables=_render_tables,
            ratios=_render_ratios,
            by_hand=mark_by_hand,
            name_torch=name_torch,
            command=lambda name: result_files.load_result_files()[name].command,
            result_files=result_files.load_result_files().values(),
            history=result_files.load_history(),
        )
        for shown in (
            figures.format_single,
            figures.format_median,
            figures.format_minimum,
            figures.format_maximum,
            figures.format_range,
            figures.format_median_range,
        ):
            self._environment.filters[shown.__name__] = shown

    def render_document(self, text: str) -> str:
        """A document's text with every part rendered again."""
        return PART.sub(
            lambda part: f"{part['begin']}\n{self.render_template(part['template'])}\n{part['end']}", text
        )

    def render_template(self, name: str) -> str:
        """A template rendered, its paragraphs wrapped."""
        return wrap_markdown(self._environment.get_template(name).render())


def name_torch(*names: str) -> str:
    """Name the torch that CSVs have timed, without the name of its build: torch 2.11.0."""
    versions = dict.fromkeys(row["torch"].partition("+")[0] for row in figures.load_rows(*names).rows)
    return f"torch {' and '.join(versions)}"


def mark_by_hand(command: str, commit: str, caller: Callable[[], str]) -> str:
    """A passage whose figures have no CSV, marked as such: `{% call by_hand("a command", "a commit") %}`."""
    return f"{caller().rstrip()} (By hand, in no CSV: {command}, commit {commit}.)\n"


def wrap_markdown(markdown: str) -> str:
    """Markdown with paragraphs and items wrapped at 120; tables, headings, code and comments are unchanged."""
    return "\n".join(_iterate_wrapped(markdown)).strip("\n") + "\n"


def _iterate_wrapped(markdown: str) -> Iterator[str]:
    prose: list[str] = []
    for line in [*markdown.split("\n"), ""]:
        ends = _NOT_PROSE.match(line) is not None
        if prose and (ends or _ITEM.match(line)):
            yield _fill_paragraph(" ".join(part.strip() for part in prose[1:]), prose[0])
            prose = []
        if ends:
            yield line
        else:
            prose.append(line)


def _fill_paragraph(rest: str, first: str) -> str:
    item = _ITEM.match(first)
    indent = " " * len(item[1]) if item else ""
    return textwrap.fill(
        f"{first.rstrip()} {rest}".rstrip(),
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _render_tables(*names: str) -> str:
    return "\n".join(kernel_tables.format_tables(records.read_records(figures.RESULTS / name for name in names)))


def _render_ratios(provider: str, *names: str) -> str:
    return "\n".join(
        kernel_tables.format_ratios(records.read_records(figures.RESULTS / name for name in names), provider)
    )
