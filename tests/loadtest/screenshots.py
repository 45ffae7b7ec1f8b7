"""Screenshots for the documents: `python -m tests.loadtest.screenshots docs`, with a server running."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.integration.harness.browser import OPTIONS

_SIZES = {"live-page.png": (1280, 1000), "load-report.png": (1280, 1610)}


def main() -> int:
    """Run the ramp with the live page open, and write both pages as PNG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write live-page.png and load-report.png")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (%(default)s)")
    parser.add_argument("--duration", default="55", metavar="S", help="of the ramp (%(default)s)")
    parser.add_argument("--chromium", default="/usr/bin/chromium", metavar="FILE", help="(%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder) / "report.html"
        browser = playwright.chromium.launch(executable_path=options.chromium, args=OPTIONS)
        pages = {}
        for name, (width, height) in _SIZES.items():
            pages[name] = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        pages["live-page.png"].goto(options.url)
        ramp = ("run", "ramp", "--url", options.url, "--duration", options.duration, "--html", str(report))
        code = subprocess.run([sys.executable, "-m", "normload", *ramp], check=False).returncode
        if code == 0:
            pages["load-report.png"].goto(report.as_uri())
            pages["load-report.png"].wait_for_timeout(500)
            for name, page in pages.items():
                page.screenshot(path=options.folder / name)
        browser.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
