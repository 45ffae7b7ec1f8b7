"""Requests whose body a front end receives, from the side of the process that owns the device."""

import asyncio
import io
import time

import numpy as np
import pytest
from normserve.admission.client_identity import ClientIdentity
from normserve.admission.permits import AdmissionBudget
from normserve.errors import ClientLeftError, DrainingError, OverloadedError, RequestTimeoutError
from normserve.http.body_reader import BodyReader
from normserve.http.middleware.origin_policy import OriginPolicy
from normserve.http.relay import relay_messages
from normserve.http.relay.relayed_operations import OperationDispatcher, OperationServices, SharedBodyOperation
from normserve.http.routes.operation_routes import OperationRoutes
from normserve.layers.registry import LayerRegistry
from normserve.memory.slabs import SlabAllocator
from normserve.requests.memory_admission import MemoryAdmission
from normserve.requests.prepared_calls import PreparedCallCache
from normserve.requests.request_lifecycle import RequestServices

from tests.service.engine.fake_engine import Scene, turn
from tests.service.http.relay.fake_front_end import FakeFrontEnd

X = np.arange(40 * 1024, dtype=np.float32).reshape(40, 1024)
NUMBER = 3


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


class Owner:
    """What answers one request; the executor returns x for y."""

    def __init__(self, *, path="/v1/layer_norm", query=b"", max_bytes=2**24, total_s=20.0, source=None):
        self.scene = Scene()
        self.front_end = FakeFrontEnd(source)
        self.limits = AdmissionBudget(max_requests=4, max_bytes=max_bytes)
        engine = self.scene.engine
        bodies = BodyReader(self.front_end.slab_pool, 2**23, max_pause_s=20.0, max_total_s=total_s)
        kept = PreparedCallCache(2**20, self.scene.metrics.get_prepared_call_counters("process"))
        operations = OperationRoutes(bodies, LayerRegistry(max_layers=4, max_bytes=2**20), kept).make_endpoints()
        admission, progress = MemoryAdmission(engine, 2**30), engine.launch_progress
        services = RequestServices(engine, self.limits, admission, progress, self.scene.metrics, 20_000)
        direct = OperationDispatcher(OperationServices(operations, OriginPolicy((), ()), None, services))
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": query,
            "headers": [(b"content-type", b"application/x-npy"), (b"host", b"localhost")],
            "scheme": "http",
            "client": ("127.0.0.1", 1),
        }
        self.handed_over = []
        prepared = direct.prepare_header(scope, "127.0.0.1")
        assert prepared is not None
        self.body = npy(X)
        self.asked = SharedBodyOperation(
            direct.services,
            self.front_end,
            relay_messages.RequestStarted(
                NUMBER, b"", ("127.0.0.1", 1), len(self.body), None, time.perf_counter(), "asked"
            ),
            prepared,
            ClientIdentity("127.0.0.1"),
            lambda error, received: self.handed_over.append((type(error), received)),
        )

    async def started(self) -> relay_messages.BodyIntoSlabRequest:
        """Let the body come; where."""
        await self.scene.engine.start()
        self.scene.engine.accept_jobs()
        assert self.asked.try_start_receiving(len(self.body))
        (receive,) = self.said(relay_messages.BodyIntoSlabRequest)
        return receive

    def come(self, receive, body) -> None:
        """The front end has received a body."""
        self.front_end.write(receive, body)
        self.asked.on_message(relay_messages.BodyReceived(NUMBER, len(body), time.perf_counter()))

    def said(self, kind) -> list:
        return [each for each in self.front_end.said if isinstance(each, kind)]

    def count(self, **labels) -> float:
        """Requests that were counted with these labels."""
        text = self.scene.metrics.render().decode()
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        lines = [line for line in text.splitlines() if line.startswith("normserve_requests_total{")]
        return sum(float(line.split()[-1]) for line in lines if all(each in line for each in wanted))


def played(play, **options):
    async def run():
        owner = Owner(**options)
        await play(owner)

    asyncio.run(run())


def test_a_body_comes_to_its_place_and_is_answered_from_where_the_result_lies():
    async def play(owner):
        receive = await owner.started()
        owner.asked.on_progress(100)
        assert (owner.asked.received_bytes, owner.limits.used_bytes) == (100, len(owner.body))
        owner.come(receive, owner.body)
        await turn()
        owner.scene.executor.finish()
        await turn()
        (result,) = owner.said(relay_messages.OperationResponse)
        response = result.make_response("asked")
        assert response.status == 200
        assert (b"content-length", b"%d" % response.nbytes) in response.headers
        np.testing.assert_array_equal(np.load(io.BytesIO(owner.front_end.body_of(response))), X)
        # What is long is read from shared memory.
        assert any(isinstance(part, relay_messages.SharedSlabRange) for part in response.body)
        assert owner.front_end.slab_pool.used_bytes > 0
        owner.asked.on_message(relay_messages.ResponseSent(NUMBER, 0.25, is_delivered=True))
        assert owner.front_end.said[-1] == ("end", NUMBER)
        assert (owner.limits.request_count, owner.count(code="200", op="layer_norm")) == (0, 1)

    played(play)


def test_what_would_be_refused_is_the_applications():
    async def play(owner):
        await owner.scene.engine.start()
        owner.scene.engine.accept_jobs()
        held = owner.limits.acquire(2**24 - 10)
        assert not owner.asked.try_start_receiving(len(owner.body))
        assert owner.front_end.said == []
        held.release()
        assert owner.asked.try_start_receiving(len(owner.body))

    played(play)


def test_a_server_that_drains_begins_nothing():
    async def play(owner):
        await owner.scene.engine.start()
        owner.scene.engine.accept_jobs()
        owner.scene.engine.start_draining()
        with pytest.raises(DrainingError):
            owner.scene.engine.require_ready()
        assert not owner.asked.try_start_receiving(len(owner.body))
        assert owner.limits.request_count == 0

    played(play)


def test_memory_that_takes_long_to_make_is_the_applications_to_make():
    made = []

    def allocate(nbytes):
        made.append(nbytes)
        return np.empty(nbytes, np.uint8)

    async def play(owner):
        await owner.scene.engine.start()
        owner.scene.engine.accept_jobs()
        assert not owner.asked.try_start_receiving(len(owner.body))
        assert (made, owner.limits.request_count, owner.front_end.said) == ([], 0, [])

    played(play, source=SlabAllocator(allocate, sizes_per_doubling=4, is_slow=True))


def test_memory_that_no_front_end_can_reach_is_not_used():
    async def play(owner):
        await owner.scene.engine.start()
        owner.scene.engine.accept_jobs()
        assert not owner.asked.try_start_receiving(len(owner.body))
        assert (owner.limits.request_count, owner.front_end.slab_pool.used_bytes) == (0, 0)

    played(
        play, source=SlabAllocator(lambda nbytes: np.empty(nbytes, np.uint8), sizes_per_doubling=4, is_slow=False)
    )


def test_a_body_that_is_nonsense_is_refused():
    async def play(owner):
        receive = await owner.started()
        owner.come(receive, b"\0" * len(owner.body))
        (answer,) = owner.said(relay_messages.ResponsePart)
        assert answer.status == 400
        assert not answer.more
        owner.asked.on_message(relay_messages.ResponseSent(NUMBER, 0.0, is_delivered=True))
        assert (owner.limits.request_count, owner.count(code="400")) == (0, 1)

    played(play)


def test_a_slow_body_is_stopped_and_the_application_says_so_once_its_place_is_free():
    async def play(owner):
        await owner.started()
        owner.asked.on_progress(500)
        while not owner.said(relay_messages.BodyStopRequest):
            await asyncio.sleep(0.01)
        # The permit is home, the memory not before the front end has let go.
        assert owner.limits.request_count == 0
        assert owner.front_end.slab_pool.used_bytes > 0
        assert owner.handed_over == []
        owner.asked.on_message(relay_messages.BodyAborted(NUMBER, is_client_disconnected=False))
        assert owner.handed_over == [(RequestTimeoutError, 500)]
        assert owner.front_end.slab_pool.used_bytes == 0
        assert owner.count() == 0

    played(play, total_s=0.02)


def test_a_body_gives_way_to_a_newcomer_though_it_became_whole_meanwhile():
    async def play(owner):
        receive = await owner.started()
        owner.asked.abort(OverloadedError("another's share"))
        owner.asked.abort(RequestTimeoutError("slow as well"))
        assert len(owner.said(relay_messages.BodyStopRequest)) == 1
        owner.come(receive, owner.body)
        await turn()
        assert owner.scene.executor.running == []
        assert owner.handed_over == [(OverloadedError, 0)]
        assert owner.limits.request_count == 0

    played(play)


@pytest.mark.parametrize("is_whole", [False, True])
def test_only_a_body_that_is_not_whole_gives_way_to_who_has_less(is_whole):
    async def play(owner):
        receive = await owner.started()
        if is_whole:
            owner.come(receive, owner.body)
            await turn()
        # Half of the budget is another's share, and nothing of it is free.
        nbytes = len(owner.body) // 2
        if is_whole:
            with pytest.raises(OverloadedError):
                owner.limits.acquire(nbytes, "another")
            assert not owner.said(relay_messages.BodyStopRequest)
            owner.scene.executor.finish()
            await turn()
            (result,) = owner.said(relay_messages.OperationResponse)
            assert result.number == NUMBER
            owner.asked.on_message(relay_messages.ResponseSent(NUMBER, 0.0, is_delivered=True))
        else:
            permit = owner.limits.acquire(nbytes, "another")
            assert len(owner.said(relay_messages.BodyStopRequest)) == 1
            permit.release()
            owner.asked.on_message(relay_messages.BodyAborted(NUMBER, is_client_disconnected=False))
            assert owner.handed_over == [(OverloadedError, 0)]
        assert (owner.limits.request_count, owner.limits.used_bytes) == (0, 0)

    # What is computed of the body counts, too.
    played(play, max_bytes=int(2.2 * X.nbytes) if is_whole else int(1.2 * X.nbytes))


def test_the_time_of_a_body_is_from_the_header_to_its_last_byte():
    start = time.perf_counter()

    async def play(owner):
        receive = await owner.started()
        owner.front_end.write(receive, owner.body)
        # It became whole a while after.
        owner.asked.on_message(relay_messages.BodyReceived(NUMBER, len(owner.body), time.perf_counter() + 5))
        await turn()
        owner.scene.executor.finish()
        await turn()
        (result,) = owner.said(relay_messages.OperationResponse)
        assert 5 <= result.measured.recv_s <= 5 + time.perf_counter() - start
        owner.asked.on_message(relay_messages.ResponseSent(NUMBER, 0.0, is_delivered=True))

    played(play)


def test_a_client_that_leaves_while_it_sends():
    async def play(owner):
        await owner.started()
        owner.asked.on_progress(700)
        owner.asked.on_message(relay_messages.ClientDisconnected(NUMBER))
        assert owner.handed_over == []
        owner.asked.on_message(relay_messages.BodyAborted(NUMBER, is_client_disconnected=True))
        assert owner.handed_over == [(ClientLeftError, 700)]
        assert (owner.limits.request_count, owner.front_end.slab_pool.used_bytes) == (0, 0)

    played(play)


def test_a_client_that_leaves_while_it_is_computed():
    async def play(owner):
        receive = await owner.started()
        owner.come(receive, owner.body)
        owner.asked.on_message(relay_messages.ClientDisconnected(NUMBER))
        await turn()
        assert owner.scene.executor.running == []
        owner.asked.on_message(relay_messages.ResponseSent(NUMBER, 0.0, is_delivered=False))
        assert (owner.limits.request_count, owner.count(code="499")) == (0, 1)

    played(play)


def test_a_front_end_that_is_lost_while_it_receives():
    async def play(owner):
        await owner.started()
        owner.asked.on_front_end_lost()
        assert (owner.limits.request_count, owner.count(code="499")) == (0, 1)
        text = owner.scene.metrics.render().decode()
        assert 'normserve_errors_total{cause="client_left"} 1.0' in text
        assert 'normserve_cancelled_total{stage="recv"} 1.0' in text
        assert owner.handed_over == []
        assert owner.front_end.said[-1] == ("end", NUMBER)

    played(play)
