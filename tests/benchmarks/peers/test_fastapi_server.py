import asyncio

import httpx
import torch
from normload.adapters.registry import ADAPTERS
from normload.adapters.row_adapters import make_parameters
from normload.clients import oracle
from normserve.client.responses.api_response import ApiResponse

from benchmarks.peers.__main__ import SIZES, make_scenario
from benchmarks.peers.fastapi_server import make_app


def test_the_plain_server_answers_right():
    ((case, _),) = make_scenario(SIZES["4 KiB"], 1.0).workload.draw_cases(0)
    held = {name: torch.from_numpy(values) for name, values in make_parameters(case).items()}
    exchange = ADAPTERS["npy"]().make_request(case, case.make_tensors())
    transport = httpx.ASGITransport(make_app(held["weight"], held["bias"]))

    async def post():
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            content = b"".join(map(bytes, exchange.parts))
            return await client.post("/layer_norm", content=content, headers=exchange.headers)

    response = asyncio.run(post())
    answer = ApiResponse(response.status_code, response.headers, memoryview(response.content))
    assert oracle.find_fault(case, case.make_tensors(), ADAPTERS["npy"]().parse_tensors(case, answer)) is None
