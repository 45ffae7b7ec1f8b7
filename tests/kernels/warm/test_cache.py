"""Triton's cache of compiled kernels, as an image brings it: one process fills it, others find everything there."""

from tests.kernels.harness.compiled import compile_elsewhere

COMPILE = """
import json
import torch
from fusednorm.launch.inspection import inspect_launch
from fusednorm.ops.layer_norm.chain import ChainCall
from fusednorm.ops.layer_norm.choices import plan_chain
from triton import knobs
from tests.kernels.harness.arrays import make

hits = []
knobs.compilation.listener = lambda *, cache_hit, **about: hits.append(cache_hit)
x, w = (torch.empty(shape, device="meta") for shape in ((64, 256), (256,)))
(launch,) = plan_chain(make(ChainCall, x, (w, w), (w, w), 1e-5, x))
inspect_launch(launch)
print(json.dumps(hits))
"""


def listing(folder):
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_kernels_are_found_where_they_were_written_and_nowhere_else(monkeypatch, tmp_path):
    """Why what an image brings is copied to the same folder of a pod's volume, and may be read-only."""
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    assert compile_elsewhere(COMPILE) == [False]
    filled = listing(cache)
    assert filled
    assert compile_elsewhere(COMPILE) == [True]
    assert listing(cache) == filled

    cache.rename(elsewhere)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(elsewhere))
    assert compile_elsewhere(COMPILE) == [False]


def test_a_kernel_that_is_not_there_needs_a_folder_to_write_to(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/no-folder-can-be-made-here")
    refused = COMPILE.replace(
        "inspect_launch(launch)", "try: inspect_launch(launch)\nexcept OSError: hits.append('refused')"
    )
    assert compile_elsewhere(refused) == ["refused"]
