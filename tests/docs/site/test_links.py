"""Links of the site's pages lead where a reader can go."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parents[3] / "docs"


def render(text, page="local.md"):
    spec = importlib.util.spec_from_file_location("site_links", DOCS / "site/links.py")
    links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(links)
    return links.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=page)))


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("local.md", "[a](../CONTRIBUTING.md#x)", "a (`CONTRIBUTING.md` in the repository)"),
        ("deploying/ray.md", "[a](../../.ci/run)", "a (`.ci/run` in the repository)"),
        ("deploying/ray.md", "[a](../settings.md)", "[a](../settings.md)"),
        ("adr/README.md", "[a](0001-x.md)", "[a](0001-x.md)"),
    ],
)
def test_a_file_outside_of_the_site_is_named_and_not_linked(page, link, shown):
    assert render(link, page) == shown


@pytest.mark.parametrize(
    ("page", "path"), [("local.md", "adr/"), ("deploying/ray.md", "../adr/"), ("adr/README.md", "")]
)
def test_a_decision_that_a_text_names_is_linked(page, path):
    (name,) = (each.name for each in (DOCS / "adr").glob("0032-*"))
    assert render("so (adr/0032), ADR 32.", page) == f"so ([adr/0032]({path}{name})), [ADR 32]({path}{name})."


@pytest.mark.parametrize(
    "text",
    ["`adr/0032`", "```\nadr/0032\n```", "[adr/0032](x.md)", "[x](adr/0032-y.md)", "adr/9999", "adr/0032-y.md"],
)
def test_what_is_code_or_linked_already_stays(text):
    assert render(text) == text
