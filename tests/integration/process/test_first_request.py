"""The banner's promise: what it prints works as pasted."""

import re
import subprocess

import numpy as np
import pytest
import torch


@pytest.fixture
def pasted(server, tmp_path):
    """What came of pasting the line that the server printed."""
    line = re.search(r"^ +(curl .*)$", server.log, re.MULTILINE)[1]
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    return done.stdout, np.load(tmp_path / "y.npy"), line


def test_pasted_line_normalises_its_sample(pasted, api):
    headers, y, _ = pasted
    assert headers.startswith("HTTP/1.1 200")
    sample = api.get("/sample.npy").content
    x = torch.frombuffer(bytearray(sample[128:]), dtype=torch.float32).reshape(y.shape)
    torch.testing.assert_close(torch.from_numpy(y), torch.nn.functional.layer_norm(x, x.shape[-1:]))


def test_page_shows_the_same_line(pasted, api):
    *_, line = pasted
    page = api.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert line in page.text
