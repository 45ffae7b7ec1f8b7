"""What is compiled with no GPU is what a process with one looks up."""

import pytest

from tests.kernels.harness.compiled import compile_elsewhere

BAKE = """
import contextlib, io, json, sys
from fusednorm.warm import __main__ as warm
from fusednorm.warm.warm_calls import list_warm_launches

# One kernel of each, of the forward pass: compiling takes its time.
warm.list_warm_launches = lambda gpu, length, only_warm_up: list_warm_launches(gpu, length, only_warm_up)[:1]
said = io.StringIO()
with contextlib.redirect_stdout(said):
    try:
        code = warm.main(sys.argv[1:])
    except SystemExit as ended:
        code = ended.code
print(json.dumps([code, said.getvalue().splitlines()]))
"""

# A driver as that of a GPU, but for the GPU; launches are taken for launched.
LAUNCH = """
import json, sys
from dataclasses import replace
from types import SimpleNamespace
from fusednorm.devices.device_properties import H200
from fusednorm.launch import prepared_kernels
from fusednorm.launch.recorded_launches import bind_to_meta_tensors
from fusednorm.launch.memories import PlanTensors
from fusednorm.warm.warm_calls import list_warm_launches
from fusednorm.warm.absent_driver import AbsentDriver
from triton import knobs
from triton.runtime import driver

launched = []

class Launcher:
    def __init__(self, src, metadata):
        pass
    def __call__(self, *arguments):
        launched.append(arguments[:3])

class Driver(AbsentDriver):
    launcher_cls = Launcher
    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232448},
    )

driver.set_active(Driver([H200]))
hits = []
knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
launch = list_warm_launches(H200, int(sys.argv[1]), True)[0]
launch = replace(launch, arguments=bind_to_meta_tensors(launch.arguments))
prepared_kernels.launch_kernel(launch, PlanTensors(None, {}), 0)
print(json.dumps([hits, len(launched)]))
"""

LENGTHS = 64
OPTIONS = ("--arch", "90", "--multiprocessors", "132", "--jobs", "1", "--only-warm-up")


def listing(folder):
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.name != "lock"}


@pytest.fixture(scope="module")
def baked(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        code, said = compile_elsewhere(BAKE, *OPTIONS, "--lengths", "64")
    assert code == 0, said
    return cache, said


@pytest.fixture
def cache(baked, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(baked[0]))
    return baked[0]


def test_it_says_what_it_compiled(baked):
    _, (kernel, total, _) = baked
    assert kernel.startswith("sm_90 layer_norm_forward_tile_kernel ")
    assert total.startswith("1 kernels compiled, ")
    assert total.endswith(" 0 missing")


def test_a_process_with_the_gpu_finds_it(cache):
    before = listing(cache)
    assert compile_elsewhere(LAUNCH, "64") == [[True], 1]
    assert listing(cache) == before


def test_what_the_cache_lacks_is_compiled_as_ever(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compile_elsewhere(LAUNCH, "64") == [[False], 1]


def test_a_full_cache_compiles_nothing(cache):
    before = listing(cache)
    code, said = compile_elsewhere(BAKE, *OPTIONS, "--lengths", "64")
    assert code == 0
    assert said[0].startswith("0 kernels compiled, ")
    assert listing(cache) == before


def test_kernels_without_their_note_are_found(cache, tmp_path):
    (note,) = [path for path in (cache / "fusednorm-warm").iterdir() if path.name != "lock"]
    aside = note.rename(tmp_path / "note")
    code, said = compile_elsewhere(BAKE, *OPTIONS, "--lengths", "64")
    aside.unlink()
    assert code == 0
    assert said[0].endswith(" there")
    assert note.exists()


def test_a_kernel_that_does_not_compile_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    failing = BAKE.replace("said =", "warm.CacheWarmer._compile_ticket = lambda *_: 1 / 0\nsaid =")
    code, said = compile_elsewhere(failing, *OPTIONS, "--lengths", "64")
    assert code == 1
    assert said[0].endswith(" failed")
    assert said[1].endswith(" 1 missing")
    assert [path.name for path in (tmp_path / "fusednorm-warm").iterdir()] == ["lock"]


def test_an_unknown_gpu_needs_its_multiprocessors(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code, _ = compile_elsewhere(BAKE, "--arch", "77")
    assert code == 2


def test_a_cache_that_cannot_be_written_to_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/no-folder-can-be-made-here")
    code, said = compile_elsewhere(BAKE, *OPTIONS, "--lengths", "64")
    assert code == 2
    assert said == []
