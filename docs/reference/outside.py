"""What pages of the site link to outside of the site: files of the repository, which are named and not linked."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#]*)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with each page's text."""
    folder = posixpath.dirname(page.file.src_uri)

    def name_outside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["target"]))
        return (
            f"{link['text']} (`{path.removeprefix('../')}` in the repository)"
            if path.startswith("../")
            else link[0]
        )

    return _LINK.sub(name_outside, markdown)
