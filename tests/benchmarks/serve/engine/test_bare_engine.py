"""The engine alone, on the CPU: everything that is asked comes out, and the stages account for it."""

import asyncio

from benchmarks.serve.engine.bare_engine import BareEngine


def test_requests_follow_one_another_and_slabs_come_home():
    async def play() -> None:
        engine = BareEngine("torch")
        assert await engine.start() == "cpu"
        jobs = await engine.make_jobs(2**20, 2)
        passage = await engine.run_turn(jobs, 0.0, passes=3)
        assert passage.bytes_per_second > 0
        assert set(passage.stages_ms) == {"queue", "copy_in", "kernel", "copy_out", "elsewhere"}
        assert passage.stages_ms["kernel"] > 0
        # The device's thread may hold the last result for a moment.
        async with asyncio.timeout(5):
            while engine.slabs.used_bytes != 2 * 2**20:
                await asyncio.sleep(0.01)
        engine.stop()

    asyncio.run(play())
