"""Finds literal figures in a text; only queries can be checked against a CSV."""

import re
from collections.abc import Iterator

from jinja2 import Environment

_UNITS = "µs|us|ms|s|%|GB/s|TB/s|times|answers|requests a second|instructions|registers"

FIGURE = re.compile(
    rf"""(?<![\w.,])(?: \d+\.\d+ (?![.\w])          # a decimal number, but no version of three parts
                      | \d[\d,]*(?:\ to\ [\d,]+)?\ (?:{_UNITS}) (?!\w)  # or a whole one of something measured
                    )""",
    re.VERBOSE,
)

_CODE = re.compile(r"^```.*?^```|^    [^\n]*|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.MULTILINE | re.DOTALL)

_EXEMPT = "by_hand"


def find_figures(markdown: str) -> list[str]:
    """The figures of a text outside of code, links and comments."""
    return FIGURE.findall(_CODE.sub(" ", markdown))


def find_literal_figures(template: str) -> list[str]:
    """Figures that a template has itself, in its text or within queries, outside of passages `by_hand`."""
    return [
        figure
        for kind, text in _iterate_tokens(template)
        for figure in (find_figures(text) if kind == "data" else FIGURE.findall(text.strip("\"'")))
    ]


def find_exempt_passages(template: str) -> list[tuple[str, str]]:
    """Command and commit of each passage `by_hand`."""
    return re.findall(rf'call {_EXEMPT}\("([^"]+)", "([^"]+)"\)', template)


def _iterate_tokens(template: str) -> Iterator[tuple[str, str]]:
    """Text, strings and numbers of a template, outside of passages `by_hand`."""
    depth, tag = 0, ""
    for _, kind, text in Environment().lex(template):
        if kind == "block_begin":
            tag = "block"
        elif kind == "name" and tag:
            depth += (text == "call") - (text == "endcall")
            tag = ""
        elif kind in ("data", "string", "float") and not depth:
            yield kind, text
