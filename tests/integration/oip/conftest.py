"""NVIDIA's own client, of a server with everything at its default."""

import pytest
import torch

from tests.integration.harness.wire import packed

NORM = torch.linspace(0.5, 1.5, 8), torch.linspace(-1, 1, 8)


@pytest.fixture(scope="module")
def client(server):
    # The tests on a GPU do without.
    import tritonclient.http as triton

    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture
def registered(api):
    """The name of a LayerNorm of eight channels, eps 1e-3 and relu."""
    weight, bias = NORM
    query = {"op": "layer_norm", "eps": "1e-3", "activation": "relu"}
    headers = {"content-type": "application/x-safetensors"}
    name = "blocks.0.norm"
    content = packed(weight=weight, bias=bias)
    assert api.put(f"/v1/layers/{name}", params=query, content=content, headers=headers).status_code in (200, 201)
    yield name
    api.delete(f"/v1/layers/{name}")
