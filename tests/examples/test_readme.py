"""The commands and programs of README's first screens, as a newcomer pastes them."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def snippets(language: str, holding: str) -> list[str]:
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if holding in text]
    assert found
    return found


def test_the_curl_lines_normalise_the_sample(url, tool, tmp_path):
    tool("curl")
    (command,) = snippets("sh", "curl")
    subprocess.run(["sh", "-c", command.replace(ADDRESS, url)], cwd=tmp_path, check=True, capture_output=True)
    y = np.load(tmp_path / "y.npy")
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-5)


@pytest.mark.parametrize("snippet", snippets("python", "import"))
def test_a_program_runs(url, snippet):
    exec(compile(snippet.replace(ADDRESS, url), "README.md", "exec"), {})


def test_every_link_leads_to_a_file():
    root = Path(__file__).parents[2]
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert target.startswith("http") or (root / target).exists(), target
