import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.models.architectures import ARCHITECTURES
from benchmarks.models.cells import CELLS

from .conftest import TINY


def test_a_seed_gives_the_same_weights_and_no_vector_of_ones():
    models = [TINY.make_model((2, 32, 4, 4), "cpu") for _ in range(2)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == torch.bfloat16
        assert one.ndim > 1 or one.std() > 0.01


def test_images_lie_channels_last_where_the_model_does():
    architecture = ARCHITECTURES["vae_decoder"]
    (latent,) = architecture.forward_inputs((1, 3, 64, 128), "cpu").values()
    assert latent.shape == (1, 4, 8, 16)
    assert latent.is_contiguous(memory_format=torch.channels_last)
    (volume,) = ARCHITECTURES["unet3d"].forward_inputs((2, 4, 8, 8, 8), "cpu").values()
    assert volume.is_contiguous(memory_format=torch.channels_last_3d)
    for name in ("vit", "convnext"):
        (image,) = ARCHITECTURES[name].forward_inputs((2, 3, 8, 8), "cpu").values()
        assert image.is_contiguous()
    unet = ARCHITECTURES["unet3d"].make_model((2, 4, 8, 8, 8), "cpu")
    assert all(
        weight.is_contiguous(memory_format=torch.channels_last_3d)
        for weight in unet.parameters()
        if weight.ndim == 5
    )


def test_each_sample_of_a_diffusion_model_has_a_condition():
    inputs = ARCHITECTURES["dit"].forward_inputs((2, 3, 16), "cpu")
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {"x": (2, 3, 16), "condition": (2, 16)}


def test_labels_are_for_training_alone():
    inputs = ARCHITECTURES["gpt2"].forward_inputs((2, 7), "cpu")
    assert list(inputs) == ["input_ids"]
    assert ARCHITECTURES["gpt2"].step_inputs(inputs)["labels"] is inputs["input_ids"]
    assert ARCHITECTURES["gpt2"].loss(SimpleNamespace(loss=3)) == 3


@pytest.fixture
def packages(monkeypatch):
    """Packages that give what they are asked for, and remember with what."""
    asked = {"timm": []}

    def config(name):
        return lambda **options: asked.setdefault(name, options)

    transformers = ModuleType("transformers")
    for name in ("GPT2Config", "BertConfig", "LlamaConfig"):
        setattr(transformers, name, config(name))
    for name in ("GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM"):
        setattr(transformers, name, lambda options: nn.Linear(2, 2))
    timm = ModuleType("timm")
    timm.create_model = lambda name, pretrained: asked["timm"].append(name) or nn.Linear(2, 2)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "timm", timm)
    return asked


def test_models_of_packages_have_no_dropout(packages):
    for name in ("gpt2", "bert", "llama", "vit", "convnext"):
        assert isinstance(ARCHITECTURES[name].make_model((1, 4), "cpu"), nn.Linear)
    assert not any(packages["GPT2Config"].values())
    assert len(packages["BertConfig"]) == 2
    assert not any(packages["BertConfig"].values())
    assert packages["LlamaConfig"]["num_hidden_layers"] == 4
    assert packages["timm"] == ["vit_base_patch16_224", "convnext_base"]


def test_every_cell_is_of_an_architecture_and_has_a_name_of_its_own():
    assert {cell.architecture for cell in CELLS} == ARCHITECTURES.keys()
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_targets_come_first_and_what_takes_compiling_last():
    variants = [cell.variants for cell in CELLS]
    first = variants.index(("compile",))
    assert set(variants[first:]) == {("compile",)}
    assert CELLS[0].name == "model gpt2 1x512 eager graph, step forward"
    batches = {cell.shape[0] for cell in CELLS[:first] if cell.architecture == "gpt2"}
    assert batches == {1, 2, 4, 8, 16}
