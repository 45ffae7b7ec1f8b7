"""Mermaid diagrams of the pages as pictures, drawn while the site is built: no page loads a script for them."""

import base64
import re
from typing import Any

import mermaidx

_DIAGRAM = re.compile(r"^```mermaid\n(?P<source>.*?)^```$", re.MULTILINE | re.DOTALL)
_THEMES = {"light": "default", "dark": "dark"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with each page's text."""
    return _DIAGRAM.sub(lambda diagram: draw_diagram(diagram["source"]), markdown)


def draw_diagram(source: str) -> str:
    """Draw a diagram for both colour schemes; the theme's style hides the one that is not used."""
    return "\n".join(
        f"![Diagram](data:image/svg+xml;base64,{draw_svg(source, theme)}#only-{scheme}){{.diagram}}"
        for scheme, theme in _THEMES.items()
    )


def draw_svg(source: str, theme: str) -> str:
    """Draw a diagram as SVG, in base64."""
    return base64.b64encode(mermaidx.render(source, theme=theme).svg().encode()).decode()
