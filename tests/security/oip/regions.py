"""Regions of shared memory as a client registers and uses them."""

import uuid
from pathlib import Path

PREFIX = f"normserve-test-{uuid.uuid4().hex[:8]}-"


SHARED_MEMORY = Path("/dev/shm")


MIB = 2**20


REFUSED = "the key is of no shared memory that this server may use"


def held(server, client) -> tuple[object, ...]:
    """Descriptors, and what the server says that it has in use."""
    names = ("normserve_inflight_bytes ", 'normserve_slab_bytes{state="used"}', "normserve_oip_region")
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(names)]
    return server.descriptors(), *lines


def register(http, name="r", key=PREFIX + "a", byte_size=4096, headers=None, **more):
    said = {"key": key, "byte_size": byte_size, **more}
    return http.post(f"/v2/systemsharedmemory/region/{name}/register", json=said, headers=headers)


def in_region(nbytes=4096, offset=0, region="r") -> dict[str, object]:
    return {"shared_memory_region": region, "shared_memory_byte_size": nbytes, "shared_memory_offset": offset}


def infer(http, source=None, target=None, cols=1024, headers=None):
    """One row through LayerNorm; in the body and in the answer, where no region is given."""
    x = {"name": "x", "datatype": "FP32", "shape": [1, cols]}
    given = {"data": [1.0] * cols} if source is None else {"parameters": source}
    wanted = {"name": "y", "parameters": {"binary_data": True} if target is None else target}
    return http.post(
        "/v2/models/layer_norm/infer", json={"inputs": [x | given], "outputs": [wanted]}, headers=headers
    )


def assert_refused(response, told: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    assert told in response.json()["error"], response.text
