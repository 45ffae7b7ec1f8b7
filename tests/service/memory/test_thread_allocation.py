"""Memory that another thread has made belongs to the caller alone."""

import asyncio
import threading
import weakref
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import pytest
from normserve.memory.thread_allocation import make_unretained_on_thread


class LingeringExecutor(ThreadPoolExecutor):
    """Each thread holds its result until the test lets it end."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def submit(self, call, /, *args, **kwargs) -> Future:
        future: Future = Future()

        def run() -> None:
            try:
                result = call(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            self.may_end.wait(20)

        threading.Thread(target=run).start()
        return future


class Memory:
    """Something whose end can be seen."""


def run_beside(executor: Executor, body) -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(executor)
        await body()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_what_is_made_ends_with_the_callers_last_reference():
    executor = LingeringExecutor()

    async def body() -> None:
        made = await make_unretained_on_thread(Memory)
        ended = weakref.ref(made)
        del made
        # The future of the thread goes with the loop's next turns.
        for _ in range(3):
            await asyncio.sleep(0)
        assert ended() is None
        executor.may_end.set()

    try:
        run_beside(executor, body)
    finally:
        executor.may_end.set()


def test_arguments_are_passed_on_and_errors_raised():
    async def body() -> None:
        assert await make_unretained_on_thread(int, "11", base=2) == 3
        with pytest.raises(ValueError, match="invalid literal"):
            await make_unretained_on_thread(int, "x")

    asyncio.run(asyncio.wait_for(body(), 20))
