"""The generated pages are what the code would generate now."""

from pathlib import Path

import pytest
from normserve.cli.reference_pages import PAGES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_not_stale(name):
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), "run `python -m normserve.cli.reference_pages docs`"
