"""A real checkpoint and real activations, end to end: the example as a user runs it, and its numbers."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from normserve.client import Client
from torch.nn.functional import layer_norm

EXAMPLE = Path(__file__).parents[3] / "examples" / "minilm.py"


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.spec_from_file_location("minilm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def embeddings(minilm):
    return minilm.embed(minilm.SENTENCES)


@pytest.fixture
def served(minilm, start_server):
    """A server that holds the checkpoint's layers."""
    return start_server("--checkpoint", str(minilm.model_directory() / "model.safetensors"))


@pytest.fixture
def client(served):
    with Client(served.url) as client:
        yield client


def test_real_activations_come_back_as_torch_would_have_them(minilm, embeddings, client):
    weight, bias = minilm.parameters(minilm.LAYER)
    eps = client.layer(minilm.LAYER)["eps"]
    x = torch.from_numpy(embeddings.words + embeddings.positions)
    expected = layer_norm(x, weight.shape, weight, bias, eps)

    assert len(client.layers()) == 13
    torch.testing.assert_close(client.layer_norm(x, layer=minilm.LAYER).y, expected)

    fused = client.layer_norm(embeddings.words, residual=embeddings.positions, layer=minilm.LAYER)
    np.testing.assert_allclose(fused.y, expected.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(fused.residual_out, x.numpy())

    half = client.layer_norm(x.bfloat16(), layer=minilm.LAYER).y
    torch.testing.assert_close(
        half.float(), layer_norm(x.bfloat16().float(), weight.shape, weight, bias, eps), rtol=1e-2, atol=1e-2
    )


def test_every_layer_of_the_checkpoint_is_its_own(minilm, embeddings, client):
    x = torch.from_numpy(embeddings.words + embeddings.positions)
    for layer in client.layers():
        weight, bias = minilm.parameters(layer["name"])
        y = client.layer_norm(x, layer=layer["name"]).y
        torch.testing.assert_close(y, layer_norm(x, weight.shape, weight, bias, layer["eps"]))


def test_the_layers_have_the_models_own_eps(minilm, client):
    config = json.loads((minilm.model_directory() / "config.json").read_text())
    assert {layer["eps"] for layer in client.layers()} == {config["layer_norm_eps"]}


@pytest.mark.slow
def test_the_example_runs_as_its_text_says(served):
    ran = subprocess.run([sys.executable, EXAMPLE, "--url", served.url], capture_output=True, text=True, check=True)
    difference = float(ran.stdout.split("largest difference to torch: ")[1].split()[0])
    assert difference < 1e-5
    where = subprocess.run([sys.executable, EXAMPLE, "--where"], capture_output=True, text=True, check=True)
    assert Path(where.stdout.strip()).is_file()
