"""The commands and programs of README, as a newcomer pastes them, and where documents lead to."""

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


def test_every_decision_is_in_the_index_under_its_title():
    folder = Path(__file__).parents[2] / "docs" / "adr"
    records = sorted(folder.glob("0*.md"))
    assert records
    titles = [
        record.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").split(". ", 1) for record in records
    ]
    rows = [f"| {number} | [{title}]({path.name}) |" for (number, title), path in zip(titles, records, strict=True)]
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert [line for line in index.splitlines() if re.match(r"\| [0-9]", line)] == rows
