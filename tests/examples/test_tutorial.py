"""The tutorial, from its first command to its last, in the order in which a newcomer follows it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def snippets(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", TUTORIAL, re.DOTALL)
    assert found
    return found


def test_its_programs_run_one_after_another(url):
    namespace: dict[str, object] = {}
    for snippet in snippets("python"):
        exec(compile(snippet.replace(ADDRESS, url), "tutorial.md", "exec"), namespace)
    assert len(namespace["second"]) == 412
    namespace["client"].close()


@pytest.mark.slow
def test_its_commands_run(url, tool, tmp_path):
    tool("curl")
    started, sent, _, loaded = snippets("sh")
    assert started == "make serve\n"
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in (sent, loaded):
        subprocess.run(
            ["sh", "-c", command.replace(ADDRESS, url)],
            cwd=tmp_path,
            env=os.environ | {"PATH": commands},
            check=True,
            capture_output=True,
        )
    np.testing.assert_allclose(np.load(tmp_path / "y.npy").mean(axis=-1), 0, atol=1e-5)
