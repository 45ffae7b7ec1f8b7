"""Commands with curl, wherever they are pasted from: a refusal is shown, fails, and is not saved as a result."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from normserve.http.curl import make_sample_command
from normserve.http.routes.page_routes import list_example_commands

from tests.integration.harness.servers import find_free_port

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/tutorial.md", "docs/http-api.md", "docs/observability.md")
ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):8000")
URL = "http://server"


def list_commands() -> Iterator[tuple[str, str]]:
    """Yield where each command is pasted from, and the command, with `URL` as the server's."""
    for document in DOCUMENTS:
        snippets = re.findall(r"```sh\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
        (command,) = (each for each in snippets if "sample.npy" in each)
        yield document, ADDRESS.sub(URL, command)
    # The first line of the page is what the server prints at its start.
    for number, command in enumerate(list_example_commands(URL, with_key=False)):
        yield f"page {number}", command
    yield "docs", make_sample_command("$URL")


COMMANDS = [pytest.param(command, id=place) for place, command in list_commands()]


@pytest.fixture(scope="module")
def locked(launched):
    return launched(env={"NORMSERVE_API_KEY": "s3cret-key"})


@pytest.fixture
def paste(tool, tmp_path):
    tool("curl")

    def paste(command: str, url: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "y.npy").write_bytes(b"the result of an earlier command, with a detail\0")
        environment = os.environ | {"URL": url}
        return subprocess.run(
            ["sh", "-c", command.replace(URL, url)], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return paste


@pytest.mark.parametrize("command", COMMANDS)
def test_a_refusal_is_shown_and_fails(command, paste, locked, tmp_path):
    done = paste(command, locked.url)
    assert done.returncode != 0
    assert "given as Authorization: Bearer KEY" in done.stdout
    assert done.stdout.count('"code": "unauthorized"') == 1
    assert "info" in command or not (tmp_path / "y.npy").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_is_not_there_is_named(command, paste, tmp_path):
    url = f"http://127.0.0.1:{find_free_port()}"
    done = paste(command, url)
    assert done.returncode != 0
    assert "curl: (7)" in done.stderr
    assert "info" in command or not (tmp_path / "y.npy").exists()


def test_the_api_page_has_them(url):
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    for op, query in (("layer_norm", ""), ("rms_norm", ""), ("group_norm", "?num_groups=2")):
        shown = paths[f"/v1/{op}"]["post"]["description"]
        assert make_sample_command("$URL", f"/v1/{op}{query}") in shown
