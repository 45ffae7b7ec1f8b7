"""Bodies that come, stall, are cut off, are left alone and are computed: permits and memory all come home."""

import asyncio
import gc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from normserve.admission.permits import AdmissionBudget
from normserve.errors import ClientLeftError, NormserveError
from normserve.http.body_reader import BodyReader
from normserve.http.transport import IncomingBody
from normserve.memory.slabs import SlabPool

from tests.service.http.fake_exchanges import make_exchange

UNIT = 2**16
MAX_REQUESTS, MAX_BYTES, MAX_BODY = 3, 6 * UNIT, 3 * UNIT


class Client:
    """One request: what its connection does, and the task that serves it."""

    def __init__(self, machine: "Machine", announced: int | None, address: str) -> None:
        self.announced = announced
        self.left = MAX_BODY + 1 if announced is None else announced
        self.sent = bytearray()
        self.reception = IncomingBody(announced, bytearray)
        if not announced and announced is not None:
            self.reception.mark_complete()
        self.exchange = make_exchange(machine.limits, self.reception, address)
        self.computed = asyncio.Event()
        self.task = machine.loop.create_task(self.serve(machine.reader))

    async def serve(self, reader: BodyReader) -> str:
        """The edge and a route."""
        try:
            body = await self.read(reader)
            assert body == self.sent
            self.exchange.permit.grow(1)
            await self.computed.wait()
            return "computed"
        except NormserveError as error:
            return error.code
        finally:
            if self.exchange.permit is not None:
                self.exchange.permit.release()

    async def read(self, reader: BodyReader) -> memoryview:
        """The body, or nothing is held any more: an answer may take its time."""
        try:
            return await reader.admit_and_receive_body(self.exchange)
        except NormserveError:
            assert self.exchange.permit is None or self.exchange.permit._budget is None
            assert not self.reception.is_receiving
            raise

    def send(self, piece: bytes) -> None:
        """As the connection does: bytes that nobody receives are lost here."""
        piece = piece[: self.left]
        if not self.reception.is_receiving or self.reception.is_complete:
            return
        self.left -= len(piece)
        self.sent += piece
        if self.announced is None:
            self.reception.append_part(piece)
            return
        self.reception.get_free_buffer()[: len(piece)] = piece
        self.reception.count_received(len(piece))
        if not self.left:
            self.reception.mark_complete()


class Machine(RuleBasedStateMachine):
    """Clients at two addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.limits = AdmissionBudget(max_requests=MAX_REQUESTS, max_bytes=MAX_BYTES, clock=lambda: self.now)
        self.slabs = SlabPool(max_idle_bytes=0)
        self.reader = BodyReader(self.slabs, MAX_BODY, max_pause_s=60, max_total_s=60, min_bytes_per_s=1000)
        self.clients: list[Client] = []

    def turn(self) -> None:
        """Let the loop do what there is to do."""
        for _ in range(5):
            self.loop.run_until_complete(asyncio.sleep(0))

    @rule(
        announced=st.sampled_from((None, 0, 10, UNIT, 3 * UNIT, MAX_BODY + 1)),
        address=st.sampled_from(("10.0.0.1", "10.0.0.2")),
        is_quick=st.booleans(),
    )
    def come(self, announced: int | None, address: str, is_quick: bool) -> None:
        self.clients.append(Client(self, announced, address))
        if not is_quick:
            self.turn()

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), nbytes=st.sampled_from((0, 1, 10, UNIT // 2, 3 * UNIT)), is_quick=st.booleans())
    def send(self, data: st.DataObject, nbytes: int, is_quick: bool) -> None:
        data.draw(st.sampled_from(self.clients)).send(bytes(nbytes))
        if not is_quick:
            self.turn()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def end_chunks(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        if client.announced is None and client.reception.is_receiving:
            client.reception.mark_complete()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.clients)).reception.abort(ClientLeftError("gone"))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.clients)).task.cancel()

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.clients)).computed.set()
        self.turn()

    @rule(seconds=st.sampled_from((0.5, 2.0, 10.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def budget_is_kept(self) -> None:
        held = [client.exchange.permit for client in self.clients if client.exchange.permit is not None]
        inside = [permit for permit in held if permit._budget is not None]
        assert self.limits.request_count == len(inside) <= MAX_REQUESTS
        assert self.limits.used_bytes == sum(permit.nbytes for permit in inside) <= MAX_BYTES

    @invariant()
    def memory_is_what_permits_say(self) -> None:
        # A slab of 10 bytes is 64 KiB long.
        if self.slabs.used_bytes > self.limits.used_bytes + MAX_REQUESTS * 65536:
            # The error of a body that was cut off may be in a cycle with the frame that holds the body; a cancelled
            # task keeps its error.
            for client in self.clients:
                if client.task.cancelled():
                    client.task = self.loop.create_future()
                    client.task.cancel()
            gc.collect()
        assert self.slabs.used_bytes <= self.limits.used_bytes + MAX_REQUESTS * 65536

    def end_all(self) -> None:
        """What came whole is computed, the others leave.  No name outlives it: a cancelled task holds its body."""
        for client in self.clients:
            client.computed.set()
            if not client.reception.is_complete:
                client.reception.abort(ClientLeftError("gone"))
        self.turn()

    def teardown(self) -> None:
        self.end_all()
        assert all(client.task.done() for client in self.clients)
        outcomes = {client.task.result() for client in self.clients if not client.task.cancelled()}
        assert outcomes <= {"computed", "overloaded", "request_timeout", "client_left", "too_large"}
        while self.clients:
            # A cancelled task, its error, the frame in that and the client are a cycle.
            del self.clients.pop().task
        gc.collect()
        assert (self.limits.request_count, self.limits.used_bytes, self.slabs.used_bytes) == (0, 0, 0)
        assert not self.limits._body_rates
        self.loop.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=25)
