"""The table of GPUs has what the code asks of a device, and nothing asks for more."""

import ast
from pathlib import Path

import fusednorm
import pytest
import torch
from fusednorm.devices.device_properties import H200
from fusednorm.devices.gpu_models import GPUS, select_gpu_models
from fusednorm.tensors.devices import describe_device, is_absent_gpu, set_absent_gpu

META = torch.device("meta")


@pytest.fixture
def standing_in():
    yield set_absent_gpu
    set_absent_gpu(None)


def test_an_absent_gpu_answers_what_a_present_one_is_asked(standing_in):
    for gpu in GPUS:
        standing_in(gpu)
        assert is_absent_gpu(META)
        assert not is_absent_gpu(torch.device("cpu"))
        assert describe_device(META) == gpu


def test_meta_is_an_h200_to_inspect(standing_in):
    standing_in(GPUS[0])
    standing_in(None)
    assert describe_device(META) == H200


def test_models_are_told_apart():
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    assert len({(gpu.arch, gpu.multiprocessors) for gpu in GPUS}) == len(GPUS)
    assert {gpu.arch for gpu in select_gpu_models(frozenset({80, 90}))} == {80, 90}


def test_nothing_else_is_asked_of_a_device():
    """Whoever asks for more has to add it to the table: what is compiled ahead would else be of another kernel."""
    asked = set()
    for path in Path(fusednorm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("get_device_"):
                asked.add((path.name, node.attr))
            if isinstance(node, ast.Attribute) and "get_device_properties" in ast.dump(node.value):
                asked.add((path.name, node.attr))
    assert asked == {
        ("devices.py", "get_device_properties"),
        ("devices.py", "multi_processor_count"),
        ("devices.py", "get_device_capability"),
    }
