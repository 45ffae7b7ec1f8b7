"""The HTTP API's own page: everything of it comes from the server, and it works with a key."""

import re
import subprocess
from html.parser import HTMLParser

import pytest
from normserve.http.curl import make_sample_command

from tests.integration.harness.browser import browser, visit

__all__ = ["browser", "visit"]

LINKING = {"src", "href", "action", "formaction", "data", "poster", "srcset", "background", "manifest"}


class Links(HTMLParser):
    """What a document refers to, and what of it is inline."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in LINKING:
                self.links.append(value)
            if name.startswith("on") or name == "style":
                self.inline.append(name)
        if tag == "style" or (tag == "script" and "src" not in dict(attrs)):
            self.inline.append(tag)


@pytest.fixture(scope="module")
def locked(launched):
    return launched(env={"NORMSERVE_API_KEY": "s3cret-key"})


@pytest.fixture(scope="module")
def described(locked):
    with locked.client() as http:
        yield http.get("/openapi.json").json()


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_no_document_refers_to_another_origin(api, path):
    """Neither itself nor the style sheets that it names; scripts are held by the policy."""
    answer = api.get(path)
    assert answer.headers["content-type"].startswith("text/html")
    found = Links(answer.text)
    assert found.inline == []
    assert found.links
    assert not [link for link in found.links if ":" in link or link.startswith("/")]
    for link in found.links:
        part = api.get("/" + link)
        assert part.status_code == 200
        if part.headers["content-type"].startswith("text/css"):
            named = re.findall(r"url\(\s*[\"']?([^\"')]*)|@import\s+[\"']([^\"']*)", part.text)
            assert not [url for pair in named for url in pair if url and not url.startswith("data:")]


@pytest.mark.parametrize("path", ["/", "/docs", "/assets/swagger-ui-bundle.js", "/assets/docs.js"])
def test_policy_lets_in_nothing_from_elsewhere(api, path):
    policy = dict(
        rule.strip().split(" ", 1) for rule in api.get(path).headers["content-security-policy"].split(";")
    )
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("img-src") in ("'self'", "'self' data:")
    assert {policy.pop(name) for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert {policy.pop(name) for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert policy == {}


def test_it_is_asked_for_again_only_when_it_is_another(api):
    for path in ("/docs", "/assets/swagger-ui-bundle.js"):
        answer = api.get(path)
        assert answer.headers["cache-control"] == "no-cache"
        again = api.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == answer.headers["content-security-policy"]


def test_redoc_is_off(api):
    assert api.get("/redoc").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/", "/docs", "/openapi.json", "/metrics", "/livez", "/sample.npy", "/v1/info", "/nope", "/v1/layer_norm"],
)
def test_no_answer_may_be_taken_for_something_else(api, path):
    assert api.get(path).headers.get_list("x-content-type-options") == ["nosniff"]


def test_description_is_of_a_version_that_the_page_reads(api, described):
    """Swagger UI 4 reads OpenAPI 3.0 and shows nothing of 3.1."""
    for description in (described, api.get("/openapi.json").json()):
        assert re.fullmatch(r"3\.0\.\d", description["openapi"])
        assert "summary" not in description["info"]


def test_description_says_what_asks_for_the_key(described):
    assert described["components"]["securitySchemes"]["key"].items() >= {"type": "http", "scheme": "bearer"}.items()
    for path, methods in described["paths"].items():
        for operation in methods.values():
            asks = path.startswith(("/v1/", "/v2")) and not path.startswith("/v2/health/")
            assert operation.get("security") == ([{"key": []}] if asks else None), path


def test_without_a_key_none_is_described(api):
    text = api.get("/openapi.json").text
    assert "securitySchemes" not in text
    assert '"security"' not in text


def test_it_shows_and_tries_operations_with_the_key_and_its_examples_name_the_server(locked, visit, tool):
    tool("curl")
    opened = visit(f"{locked.url}/docs")
    operation = opened.page.locator(".opblock-get", has_text="/v1/info")
    operation.wait_for()
    opened.page.locator(".btn.authorize").first.click()
    opened.page.locator(".auth-container input").fill("s3cret-key")
    opened.page.locator(".auth-btn-wrapper .authorize").click()
    opened.page.locator(".auth-btn-wrapper .btn-done").click()
    operation.locator(".opblock-summary").click()
    operation.locator(".try-out__btn").click()
    operation.locator(".execute").click()
    operation.locator(".live-responses-table .response-col_status", has_text="200").wait_for()
    pasted = operation.locator(".curl-command .curl").inner_text().replace("s3cret-key", "another")
    done = subprocess.run(["sh", "-c", pasted], capture_output=True, text=True)
    assert done.returncode == 22
    assert "the API key is not one that the server knows" in done.stdout
    example = opened.page.locator(".opblock-post", has_text="/v1/group_norm").first
    example.locator(".opblock-summary").click()
    described = example.locator(".opblock-description").inner_text()
    assert make_sample_command(locked.url, "/v1/group_norm?num_groups=2") in described
    assert "$URL" not in described
    assert not [asked for asked in opened.strangers if not asked.startswith((locked.url, "data:"))]
    assert opened.complaints == []


def test_the_pages_link_to_each_other(api):
    assert "docs" in Links(api.get("/").text).links
    assert "./" in Links(api.get("/docs").text).links


def test_each_operation_fits_a_narrow_screen_in_both_colours(locked, visit):
    opened = visit(f"{locked.url}/docs", viewport={"width": 400, "height": 900})
    opened.wait("document.querySelectorAll('.opblock').length > 40")
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        ends = opened.page.locator(".opblock-summary").evaluate_all(
            "rows => rows.map(row => ['.opblock-summary-path', '.opblock-summary-description', '.arrow']"
            ".map(part => row.querySelector(part).getBoundingClientRect()).map(box => [box.left, box.right]))"
        )
        for path, summary, arrow in ends:
            assert max(path[1], summary[1]) <= arrow[0]
            assert arrow == [arrow[0], arrow[0] + 20]
            assert arrow[1] <= 400
        shade = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", shade))) < 200) == (scheme == "dark")
