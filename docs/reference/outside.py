"""What pages of the site link to outside of the site: files of the repository, which are named and not linked."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[(?P<text>[^\]]*)\]\((?:\.\./)+(?P<path>(?!adr/|docs/)[^)#]*)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this with each page's text; pages below `docs/adr` reach `docs` by `../`, and that stays."""
    if page.file.src_uri.count("/"):
        return markdown
    return _OUTSIDE.sub(lambda link: f"{link['text']} (`{link['path']}` in the repository)", markdown)
