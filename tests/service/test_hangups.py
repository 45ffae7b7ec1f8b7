"""What SIGHUP does to a process whose event loop handles it, and to one whose loop has ended."""

import asyncio
import os
import signal

import pytest
import uvloop
from normserve.hangups import handle_hangups


@pytest.fixture
def ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_it_is_handled_within_the_block_and_ignored_again_afterwards(run, ignored):
    async def serve() -> None:
        handled = asyncio.Event()
        with handle_hangups(handled.set):
            # While the loop waits, too.
            asyncio.get_running_loop().run_in_executor(None, os.kill, os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(handled.wait(), 20)
        handled.clear()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert not handled.is_set()

    run(serve())
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
