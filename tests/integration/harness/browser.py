"""A browser that opens pages of a server, and notes what it complained of or asked others for."""

import time
from dataclasses import dataclass

import pytest
from playwright.sync_api import Page, sync_playwright

# As Debian has it, and without what a browser asks the world for when it starts.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
PATIENCE_S = 20


@dataclass
class Opened:
    """The page in a browser, and what it complained of or asked others for."""

    page: Page
    complaints: list[str]
    strangers: list[str]

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true; asked from outside, since the page's policy forbids `eval`."""
        end = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"never: {condition}"
            self.page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def browser(tool):
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=tool("chromium"), args=OPTIONS)
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Opens a page: `visit(url, viewport={"width": 390, "height": 844})`; `metrics` in place of those."""
    contexts = []

    def opened(url: str, metrics: str | None = None, **options) -> Opened:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        found = Opened(page, [], [])
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(url) else found.strangers.append(asked.url))
        if metrics is not None:
            page.route("**/metrics", lambda route: route.fulfill(body=metrics))
        page.goto(url)
        return found

    yield opened
    for context in contexts:
        context.close()
