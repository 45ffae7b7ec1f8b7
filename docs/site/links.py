"""Links of the site's pages that Markdown does not have as a reader needs them.

Files of the repository outside of the site are named and not linked.  A decision that a text names, as in
"(adr/0032)" or "ADR 7", is linked.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#]*)[^)]*\)")
# A decision's name where it is no part of a link, a path or code.
_DECISION = re.compile(
    r"(?P<kept>```.*?```|`[^`\n]*`|\[[^\]]*\]\([^)]*\))|\b(?:adr/|ADR )(?P<number>\d{1,4})\b(?!-)", re.DOTALL
)
_DECISIONS = {int(path.name[:4]): path.name for path in (Path(__file__).parents[1] / "adr").glob("[0-9]*.md")}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with each page's text."""
    folder = posixpath.dirname(page.file.src_uri)

    def name_outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["target"]))
        if not path.startswith("../"):
            return link[0]
        return f"{link['text']} (`{path.removeprefix('../')}` in the repository)"

    def link_decision(found: re.Match[str]) -> str:
        if found["kept"] or int(found["number"]) not in _DECISIONS:
            return found[0]
        path = posixpath.relpath(f"adr/{_DECISIONS[int(found['number'])]}", folder or ".")
        return f"[{found[0]}]({path})"

    return _DECISION.sub(link_decision, _LINK.sub(name_outside, markdown))
