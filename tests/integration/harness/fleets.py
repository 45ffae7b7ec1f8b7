"""Layers in a fleet, as its clients see them."""

import contextlib
from collections.abc import Callable, Iterator

import httpx
import torch

from tests.integration.harness.wire import NPY, SAFETENSORS, X, from_npy, npy, packed

WEIGHT = torch.linspace(1, 2, 12)


@contextlib.contextmanager
def clients(url: str, count: int = 2) -> Iterator[list[httpx.Client]]:
    """So many connections, which go to the processes in turn."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(httpx.Client(base_url=url, timeout=60, verify=False)) for _ in range(count)]


def on_each(url: str, ask: Callable, count: int = 2) -> list:
    """What `ask` gives on that many connections."""
    with clients(url, count) as apis:
        return [ask(api) for api in apis]


def processes(api) -> list[dict]:
    return api.get("/v1/info").json()["processes"]


def pids(url: str) -> set[int]:
    return {each.get("pid") for each in on_each(url, processes, 1)[0]}


def layers(api) -> list[dict]:
    return api.get("/v1/layers").json()["layers"]


def put(api, name: str, weight: torch.Tensor = WEIGHT) -> httpx.Response:
    body = packed(weight=weight)
    headers = {"content-type": SAFETENSORS}
    return api.put(f"/v1/layers/{name}?op=rms_norm&eps=0.5", content=body, headers=headers)


def normalised(api, name: str) -> httpx.Response:
    return api.post(f"/v1/rms_norm?layer={name}", content=npy(X), headers={"content-type": NPY})


def right(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(torch.from_numpy(X), (12,), weight, 0.5)


def assert_right(response: httpx.Response, weight: torch.Tensor = WEIGHT) -> None:
    assert response.status_code == 200, response.text
    torch.testing.assert_close(torch.from_numpy(from_npy(response.content)), right(weight))
