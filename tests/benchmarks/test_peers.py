import asyncio

import httpx
import numpy as np
import torch
from normload.adapters.registry import ADAPTERS
from normload.adapters.rows import parameters
from normload.clients import oracle
from normserve.client.protocol import Answer

from benchmarks.peers.__main__ import SIZES, scenario
from benchmarks.peers.others import OTHERS
from benchmarks.peers.plain import plain_app
from benchmarks.peers.table import table


def row(server, per_second, *, size="1 MiB", connections="1", number=0, wrong=0):
    columns = {"server": server, "per_second": f"{per_second:.2f}", "size": size, "connections": connections}
    return columns | {"round": number, "wrong": wrong}


def test_a_table_has_medians_and_how_many_times_as_many_are_ours():
    rows = [
        *(row("other", rate, number=number) for number, rate in enumerate((10, 20, 90))),
        *(row("normserve", rate, number=number) for number, rate in enumerate((30, 40, 50))),
        row("other", 5, connections="8"),
        row("normserve", 40, connections="8"),
    ]
    assert table(rows).splitlines() == [
        "| server | 1 MiB, 1 | 1 MiB, 8 |",
        "|---|---|---|",
        "| normserve | 40/s | 40/s |",
        "| other | 20/s, 2.00 | 5/s, 8.00 |",
    ]


def test_wrong_answers_and_none_at_all_are_said():
    text = table([row("normserve", 10), row("other", 0, wrong=3)])
    assert "| other | 0/s, - |" in text
    assert "Wrong answers came from other." in text


def test_every_size_asks_for_the_same_parameters():
    held = [parameters(scenario(nbytes, 1.0).workload.drawn(0)[0][0]) for nbytes in SIZES.values()]
    for name in ("weight", "bias"):
        assert all(np.array_equal(held[0][name], other[name]) for other in held)


def test_every_server_speaks_something_known():
    assert {other.adapter for other in OTHERS.values()} <= ADAPTERS.keys()


def test_the_plain_server_answers_right():
    ((case, _),) = scenario(SIZES["4 KiB"], 1.0).workload.drawn(0)
    held = {name: torch.from_numpy(values) for name, values in parameters(case).items()}
    exchange = ADAPTERS["npy"]().exchange(case, case.tensors())
    transport = httpx.ASGITransport(plain_app(held["weight"], held["bias"]))

    async def post():
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            content = b"".join(map(bytes, exchange.parts))
            return await client.post("/layer_norm", content=content, headers=exchange.headers)

    response = asyncio.run(post())
    answer = Answer(response.status_code, response.headers, memoryview(response.content))
    assert oracle.fault(case, case.tensors(), ADAPTERS["npy"]().tensors(case, answer)) is None
