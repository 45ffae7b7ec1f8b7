"""The warm-up's kernels are compiled beside the start, and the start goes on whatever becomes of that."""

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fusednorm.warm import compile_records
from normserve.backends.cuda import background_compile
from normserve.backends.cuda.background_compile import BackgroundCompiler, CompileTarget, make_compiler_command

from tests.kernels.harness.compiled import compile_elsewhere

MODEL = CompileTarget(90, 132)
LENGTHS = (64, 96)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(background_compile, "load_cuda_driver", object)
    monkeypatch.setattr(background_compile, "read_compile_target", lambda: MODEL)
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: "as it is")
    return tmp_path / "cache"


@pytest.fixture
def compilers(monkeypatch):
    """Lengths that each compiler was started for; it runs `compilers.program`."""

    class Compilers(list):
        program = "pass"

    started = Compilers()

    def stand_in(model, lengths):
        assert model == MODEL
        started.append(tuple(lengths))
        return sys.executable, "-S", "-c", started.program

    monkeypatch.setattr(background_compile, "make_compiler_command", stand_in)
    return started


def begin(compiling):
    """Begin, and wait until it is known what that starts."""
    compiling.start()
    compiling._join_preparation()


def note(*lengths):
    for length in lengths:
        compile_records.record_compiled(*MODEL, length, only_warm_up=True)


def test_an_empty_cache_is_filled_from_the_begin_on(cache, compilers):
    compiling = BackgroundCompiler(LENGTHS)
    compilers.program = f"import pathlib; pathlib.Path({str(cache.parent / 'ran')!r}).touch()"
    begin(compiling)
    assert compilers == [LENGTHS]
    compiling.wait(MODEL)
    assert compilers == [LENGTHS]
    assert (cache.parent / "ran").exists()


def test_a_full_cache_starts_nothing(cache, compilers):
    note(*LENGTHS)
    compiling = BackgroundCompiler(LENGTHS)
    compiling.start()
    compiling.wait(MODEL)
    assert compilers == []


def test_what_was_baked_with_more_is_enough(cache, compilers):
    for length in LENGTHS:
        compile_records.record_compiled(*MODEL, length, only_warm_up=False)
    BackgroundCompiler(LENGTHS).wait(MODEL)
    assert compilers == []


@pytest.mark.parametrize("other", [CompileTarget(80, 108), CompileTarget(90, 114)])
def test_what_was_baked_for_another_gpu_is_not(other, cache, compilers):
    for length in LENGTHS:
        compile_records.record_compiled(*other, length, only_warm_up=True)
    compiling = BackgroundCompiler(LENGTHS)
    compiling.start()
    compiling.wait(MODEL)
    assert compilers == [LENGTHS]


def test_what_is_missing_is_compiled(cache, compilers):
    note(LENGTHS[0])
    compiling = BackgroundCompiler(LENGTHS)
    begin(compiling)
    assert compilers == [LENGTHS[1:]]
    compiling.wait(MODEL)
    assert compilers == [LENGTHS[1:]]


def test_what_another_version_compiled_is_compiled_again(cache, compilers, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(compile_records, "_describe_versions", lambda: "others")
        note(*LENGTHS)
    compiling = BackgroundCompiler(LENGTHS)
    begin(compiling)
    assert compilers == []
    compiling.wait(MODEL)
    assert compilers == [LENGTHS]


@pytest.mark.parametrize(
    "program", ["raise SystemExit(1)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_compiler_that_fails_stops_nobody(program, cache, compilers, caplog):
    compilers.program = program
    compiling = BackgroundCompiler(LENGTHS)
    compiling.start()
    with caplog.at_level(logging.WARNING):
        compiling.wait(MODEL)
    assert "compiled when it is needed" in caplog.text


def test_a_compiler_that_hangs_is_given_up(cache, compilers, monkeypatch, caplog):
    monkeypatch.setattr(background_compile, "_PATIENCE_S", 0.01)
    compilers.program = "import time; time.sleep(300)"
    compiling = BackgroundCompiler(LENGTHS)
    compiling.start()
    with caplog.at_level(logging.WARNING):
        compiling.wait(MODEL)
    assert "given up" in caplog.text
    assert compiling._compiler.returncode is not None


def test_a_compiler_that_nobody_needs_is_ended(cache, compilers):
    compilers.program = "import time; time.sleep(300)"
    compiling = BackgroundCompiler(LENGTHS)
    compiling.start()
    compiling.stop()
    assert compiling._compiler.returncode is not None


def test_no_gpu_no_compiler(cache, compilers, monkeypatch):
    monkeypatch.setattr(background_compile, "read_compile_target", lambda: None)
    compiling = BackgroundCompiler(LENGTHS)
    compiling.start()
    compiling.stop()
    assert compilers == []


def test_no_driver_nothing_loaded(cache, compilers, monkeypatch):
    monkeypatch.setattr(background_compile, "load_cuda_driver", lambda: None)
    compiling = BackgroundCompiler(LENGTHS)
    begin(compiling)
    assert compiling._preparing is None
    assert compilers == []


def test_no_triton_no_compiler(cache, compilers, monkeypatch):
    monkeypatch.setattr(background_compile, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", None)
    begin(BackgroundCompiler(LENGTHS))
    assert compilers == []


def test_a_cache_that_cannot_be_written_to_starts_nothing(cache, compilers, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    compiling = BackgroundCompiler(LENGTHS)
    compiling.start()
    compiling.wait(MODEL)
    assert compilers == []


def test_the_folder_of_the_cache_is_tritons(monkeypatch, tmp_path):
    from triton import knobs

    for name, value in {"TRITON_CACHE_DIR": "", "TRITON_HOME": "/somewhere"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert background_compile._find_triton_cache() == Path(knobs.cache.dir)
    monkeypatch.delenv("TRITON_HOME")
    assert background_compile._find_triton_cache() == Path(knobs.cache.dir)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert background_compile._find_triton_cache() == Path(knobs.cache.dir) == tmp_path
    assert background_compile._NOTES == compile_records.FOLDER


def test_the_command_is_understood(monkeypatch):
    """By the program that it runs, which compiles nothing here: this process is gone when it looks."""
    program, dash_c, source, *arguments = make_compiler_command(MODEL, LENGTHS)
    assert (program, dash_c) == (sys.executable, "-c")
    script = """
import json, sys
from fusednorm.warm import __main__ as warm
print(json.dumps({name: value for name, value in vars(warm._make_parser().parse_args(sys.argv[1:])).items()}))
"""
    understood = compile_elsewhere(script, *arguments)
    understood.pop("jobs")
    assert understood == {
        "arch": [90],
        "multiprocessors": 132,
        "lengths": [64, 96],
        "only_warm_up": True,
        "until_gone": os.getpid(),
    }
    compile(source, "the compiler", "exec")


def test_kernels_of_the_warm_up_are_those_that_are_compiled_ahead():
    """Run on tensors without memory, its batches launch nothing else."""
    script = """
import json
import fusednorm
import torch
from fusednorm.devices.gpu_models import GPUS
from fusednorm.launch.recorded_launches import recording_launches
from fusednorm.policy.batch_invariance import require_batch_invariance
from fusednorm.warm.warm_calls import make_kernel_key, list_warm_launches
from normserve.backends.library_calls import bind_operation, make_output_argument, run_operation
from normserve.backends.tensor_conversion import (
    TORCH_DTYPES, compute_launch_shape, infer_batch_result_specs, move_channels_first
)
from normserve.backends.warm_up_batches import make_warm_up_batches

def empty(dtype, shape):
    return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta")

require_batch_invariance(True)
compared = []
for gpu in GPUS[::3]:
    for length in (64, 300, 1024, 40960):
        with recording_launches(gpu) as noted:
            for batch in make_warm_up_batches([length]):
                (job,) = batch.jobs
                inputs = {
                    name: move_channels_first(
                        job.spec, name, empty(each.dtype, compute_launch_shape(job, name, job.rows))
                    )
                    for name, each in job.tensors.items()
                }
                results = {name: empty(*each) for name, each in infer_batch_result_specs(job, job.rows).items()}
                bind_operation(fusednorm, job.spec, inputs, {"out": make_output_argument(job.spec, results)})()
            warmed_up = {make_kernel_key(each) for each in noted}
        expected = {make_kernel_key(each) for each in list_warm_launches(gpu, length, True)}
        compared.append([len(warmed_up), warmed_up == expected])
print(json.dumps(compared))
"""
    compared = compile_elsewhere(script)
    assert all(kernels > 30 and are_equal for kernels, are_equal in compared), compared


def test_the_driver_is_asked_for_its_first_device(monkeypatch):
    attributes = {16: 132, 75: 9, 76: 0}

    def attribute(value, number, device):
        value._obj.value = attributes[number]
        return 0

    def device(found, ordinal):
        assert ordinal == 0
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGet=device, cuDeviceGetAttribute=attribute)
    monkeypatch.setattr(background_compile.ctypes, "CDLL", lambda name: driver)
    assert background_compile.read_compile_target() == MODEL
    driver.cuDeviceGet = lambda *_: 101
    assert background_compile.read_compile_target() is None


def test_beginning_loads_no_torch(tmp_path):
    """Or what compiles would load it after this process, and not at the same time."""
    script = """
import json, sys
for name in [name for name in sys.modules if name.split(".")[0] in ("torch", "fusednorm")]:
    del sys.modules[name]
sys.meta_path.insert(0, type("Refusing", (), {"find_spec": staticmethod(
    lambda name, *_: 1 / 0 if name.split(".")[0] in ("torch", "fusednorm") else None)}))
from normserve.backends.cuda import background_compile
background_compile.load_cuda_driver = object
background_compile.read_compile_target = lambda: background_compile.CompileTarget(90, 132)
background_compile.make_compiler_command = lambda *_: ("true",)
compiling = background_compile.BackgroundCompiler((64,))
compiling.start()
compiling._join_preparation()
print(json.dumps(compiling._compiler.wait()))
"""
    assert compile_elsewhere(script) == 0
