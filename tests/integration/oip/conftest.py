"""NVIDIA's own client, of a server with everything at its default."""

import pytest


@pytest.fixture(scope="module")
def client(server):
    # The tests on a GPU do without.
    import tritonclient.http as triton

    with triton.InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture
def registered(api):
    """The name of a LayerNorm of eight channels, eps 1e-3 and relu."""
    # Late, since it imports a client that tests on a GPU do without.
    from tests.integration.oip.models import register_norm

    with register_norm(api) as name:
        yield name
