"""One client: its arena, the requests that it has under way, and what each of them is answered."""

import asyncio
import functools
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from normserve.admission.keys import Keyring, KeyScope
from normserve.admission.permits import Permit
from normserve.codec import local_frames as frames
from normserve.codec.local_frames import Answer, Message
from normserve.engine.progress import Progress
from normserve.errors import (
    ClientLeftError,
    DeviceFailureError,
    DrainingError,
    MalformedPayloadError,
    NormserveError,
    RetryLaterError,
)
from normserve.jobs.job import NormJob, NormResult
from normserve.local import access_log
from normserve.local.arena import Arena
from normserve.local.device import DeviceArenas, LentDeviceSegment
from normserve.local.layers import LayerMessages, Sender
from normserve.local.memory import Leftovers, Lent, LentSegment, SharedMemory, give_back
from normserve.local.operations import Operations, Request, answered
from normserve.local.own_memory import LentAllocation, OwnMemory
from normserve.local.peer import Peer
from normserve.local.session import Session
from normserve.local.wire import Wire
from normserve.logs.audit import Refusals
from normserve.metrics.metrics import Metrics
from normserve.metrics.requests import CLIENT_LEFT, RequestRecord
from normserve.problems import document, retry_after, status_of, unexpected

log = logging.getLogger(__name__)

#: Requests of one connection that are answered at the same time; of more the frames stay with the kernel.
MOST_UNDER_WAY = 64

_INFER = frozenset([KeyScope.INFER])
_ANY = frozenset(KeyScope)

# Frames that are remembered of each connection: those of a few requests that come by turns.
_MOST_KNOWN, _LONGEST_KNOWN = 64, 2048

_UNANSWERED = (frames.Cancel, frames.Free)

_names = random.Random()

Said = Message | Request


@dataclass(frozen=True, slots=True)
class Service:
    """What connections work with.

    Attributes:
        keys: None where no key is asked for.
        refusals: is told of messages that were refused for want of a key.
        progress: is told when work begins and ends.
        is_logged: whether the access log has a line for each message.
        leftovers: segments of connections that have ended.
        describe: what `/v1/info` answers.
    """

    operations: Operations
    layers: LayerMessages
    keys: Keyring | None
    refusals: Refusals
    metrics: Metrics
    progress: Progress
    memory: SharedMemory
    device_memory: DeviceArenas
    own_memory: OwnMemory
    leftovers: Leftovers
    describe: Callable[[], Awaitable[dict[str, Any]]]
    is_logged: bool = False


class Connection:
    """Answers one client, until its socket ends.

    Attributes:
        peer: the client's process.
        on_gone: told that the connection has ended, and of the segments that the client has not given back.
    """

    def __init__(self, service: Service, peer: Peer, key_name: str | None) -> None:
        """Args: key_name: of the API key that stands for the peer's user."""
        self._service = service
        self.peer = peer
        self.on_gone: Callable[[list[Lent]], None] = give_back
        self._session = Session(peer.uid, key_name, service.keys, service.refusals)
        self._arena = Arena()
        # Of the device: given back, and charged until the client's process has ended.
        self._spent: list[LentDeviceSegment] = []
        # Allocations of the client's that are being opened.
        self._opening = 0
        self._waiting: deque[tuple[int, Said, float, float]] = deque()
        # What frames said that came before: clients send the like again and again.
        self._known: dict[bytes, Sequence[Said]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Each with its tag.
        self._jobs: dict[NormJob, int] = {}
        self._wire: Wire | None = None

    @property
    def is_busy(self) -> bool:
        """Whether requests of it are under way."""
        return bool(self._tasks or self._jobs)

    def serve(self, wire: Wire) -> None:
        """Begin."""
        self._wire = wire
        wire.read(wanted=True)

    def close(self) -> None:
        """End it from this side."""
        if self._wire is not None:
            self._wire.close()

    def on_frame(self, tag: int, content: bytes, began: float, ended: float) -> None:
        """Answer what a frame says, each message under a tag of its own."""
        messages = self._known.get(content)
        if messages is None:
            try:
                messages = self._read(content)
            except MalformedPayloadError as error:
                self._refuse(tag, error, RequestRecord(transport="local", began=began), self._request_id())
                return
        if len(messages) == 1 and not self._waiting and self._has_room:
            self._begin(tag, messages[0], began, ended)
            return
        for index, message in enumerate(messages):
            self._waiting.append(((tag + index) % frames.TAGS, message, began, ended))
        self._begin_waiting()

    def _read(self, content: bytes) -> Sequence[Said]:
        said = [
            Request(each) if isinstance(each, frames.Compute) else each for each in frames.read_messages(content)
        ]
        if len(content) <= _LONGEST_KNOWN:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[content] = said
        return said

    def on_fault(self, error: NormserveError) -> None:
        """Say what is wrong, and end: nobody knows where the next frame begins."""
        self._refuse(0, error, RequestRecord(transport="local"), self._request_id())
        self.close()

    def on_end(self) -> None:
        """The client is gone: what waits is dropped, what runs completes for nobody."""
        self._waiting.clear()
        self._known.clear()
        for job in tuple(self._jobs):
            self._service.operations.engine.abandon(job)
        owned, segments = _divided(self._arena)
        segments += self._spent
        self._spent = []
        self._arena.segments.clear()
        if owned:
            # Nobody is charged for what the client has allocated, and nobody keeps it.
            give_back(owned)
        self.on_gone(segments)

    def _begin_waiting(self) -> None:
        while self._waiting and self._has_room:
            self._begin(*self._waiting.popleft())
        if self._wire is not None:
            self._wire.read(wanted=not self._waiting)

    @property
    def _has_room(self) -> bool:
        """Whether another request may be answered now."""
        return len(self._tasks) + len(self._jobs) < MOST_UNDER_WAY

    def _begin(self, tag: int, message: Said, began: float, ended: float) -> None:
        """Do what a message says; its frame came from `began` to `ended`."""
        if isinstance(message, _UNANSWERED):
            self._let_go(message)
            return
        record = RequestRecord(transport="local", stages={"recv": ended - began}, began=began)
        request_id = self._request_id()
        if isinstance(message, Request):
            self._guarded(_UnderWay(tag, message, record, request_id), self._compute)
            return
        task = asyncio.get_running_loop().create_task(self._attend(tag, message, record, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._waiting:
            self._begin_waiting()

    def _let_go(self, message: frames.Cancel | frames.Free) -> None:
        """What has no answer: of what is not there, or not any more, there is nothing to let go."""
        if isinstance(message, frames.Free):
            memory = self._arena.segments.pop(message.segment, None)
            # What is known may lie there, and would keep it.
            self._known.clear()
            if memory is not None:
                segment = _lent(memory)
                if isinstance(segment, LentDeviceSegment):
                    self._spent.append(segment)
                else:
                    give_back([segment])
            return
        for job in [job for job, tag in self._jobs.items() if tag == message.request]:
            self._service.operations.engine.withdraw(job)

    async def _attend(self, tag: int, message: Message, record: RequestRecord, request_id: str) -> None:
        """Answer one message but an operation, whatever becomes of it, and account for it."""
        try:
            await self._answer(tag, message, record, request_id)
        except NormserveError as error:
            self._refuse(tag, error, record, request_id)
        except Exception as error:
            self._refuse(tag, self._unexpected(error, request_id), record, request_id)
        else:
            self._account(record, request_id)

    async def _answer(self, tag: int, message: Message, record: RequestRecord, request_id: str) -> None:
        descriptors: tuple[int, ...] = ()
        answer = Answer(status=200, request_id=request_id)
        match message:
            case frames.Hello():
                record.op = "hello"
                answer.document = self._session.greet(message, self._offered())
            case frames.Grow():
                record.op = "grow"
                self._session.authorise(_ANY, record)
                descriptors = (await self._grow(message, answer),)
            case frames.Own():
                record.op = "own"
                self._session.authorise(_ANY, record)
                await self._open(message, answer)
            case frames.Info():
                record.op = "info"
                self._session.authorise(_ANY, record)
                answer.document = await self._service.describe()
            case _:
                record.op = "layers"
                sender = Sender(self._arena, functools.partial(self._session.authorise, record=record), request_id)
                answer.document, answer.status = await self._service.layers.answer(message, sender)
        record.status = answer.status
        self._send(frames.write(tag, answer), descriptors)

    def _offered(self) -> dict[str, Any]:
        """What the greeting says of the device's memory; nothing before the server is ready, which finds out."""
        service = self._service
        if service.operations.engine.device is None:
            return {}
        offer = service.device_memory.offer()
        return {"device": None if offer is None else {**offer, "own": service.own_memory.may(self.peer)}}

    async def _grow(self, message: frames.Grow, answer: Answer) -> int:
        """Make the segment that is asked for and say so in the answer; the descriptor to go with it."""
        service = self._service
        service.operations.engine.require_ready()
        segment: LentSegment | LentDeviceSegment
        if message.memory == "device":
            lend = service.device_memory.lend(self.peer, message.nbytes, self._spent, service.leftovers)
            descriptor, segment = await lend
            answer.device, answer.nbytes = segment.device.uuid, len(segment)
            memory = segment.whole()
        else:
            descriptor, segment = await service.memory.lend(self.peer.uid, message.nbytes)
            memory = memoryview(segment)
        if self._wire is None or not self._wire.is_open:
            service.leftovers.keep(self.peer.pid, self.peer.watch(), [segment])
        answer.segment = self._arena.add(memory)
        return descriptor

    async def _open(self, message: frames.Own, answer: Answer) -> None:
        """Open what the client has allocated, and say its number in the answer."""
        service = self._service
        service.operations.engine.require_ready()
        owned, _ = _divided(self._arena)
        held = len(owned) + self._opening
        self._opening += 1
        try:
            opened = await service.own_memory.open(self.peer, message.handle, message.nbytes, held)
        finally:
            self._opening -= 1
        if self._wire is None or not self._wire.is_open:
            give_back([opened])
            return
        answer.device, answer.nbytes = opened.device.uuid, len(opened)
        answer.opened = self._arena.add(opened.whole())

    def _compute(self, asked: "_UnderWay") -> None:
        """Have an operation run; it is answered from the engine's own callback, without a task that waits."""
        operations = self._service.operations
        caller = self._session.authorise(_INFER, asked.record)
        job, deadline, permit = operations.admit(asked.request, self._arena, caller, asked.record)
        try:
            reply = operations.engine.begin(job, deadline)
        except BaseException:
            permit.release()
            raise
        self._service.progress.begin()
        self._jobs[job] = asked.tag
        asked.job, asked.permit = job, permit
        reply.add_done_callback(functools.partial(self._guarded, asked, self._conclude))

    def _conclude(self, asked: "_UnderWay", reply: asyncio.Future[NormResult]) -> None:
        service = self._service
        assert asked.job is not None
        assert asked.permit is not None
        del self._jobs[asked.job]
        service.operations.engine.end(asked.job)
        service.progress.end()
        asked.permit.release()
        error = reply.exception()
        if error is not None and isinstance(error, DrainingError | DeviceFailureError):
            # It may run still, and would write where the client, once it has an answer, keeps something else.
            self.close()
        if self._waiting:
            self._begin_waiting()
        record, request_id = asked.record, asked.request_id
        if error is not None:
            # Not raised: its traceback would hold this frame, and with it, through the future, itself and the job.
            known = error if isinstance(error, NormserveError) else self._unexpected(error, request_id)
            self._refuse(asked.tag, known, record, request_id)
            return
        began = time.perf_counter()
        frame = frames.write(asked.tag, answered(asked.request, reply.result(), request_id, record))
        record.stages["serialize"] = time.perf_counter() - began
        record.status = 200
        record.waiting_in = "send"
        self._send(frame)
        self._account(record, request_id)

    def _guarded(self, asked: "_UnderWay", work: Callable[..., None], *arguments: Any) -> None:
        """Do something for a request that answers it, now or later; refuse it if that goes wrong."""
        try:
            work(asked, *arguments)
        except NormserveError as error:
            self._refuse(asked.tag, error, asked.record, asked.request_id)
        except Exception as error:
            known = self._unexpected(error, asked.request_id)
            self._refuse(asked.tag, known, asked.record, asked.request_id)

    def _unexpected(self, error: BaseException, request_id: str) -> NormserveError:
        fields = {"request_id": request_id, "key": self._session.caller.key}
        log.error("a request met an error that nobody expected", exc_info=error, extra={"fields": fields})
        return unexpected(error)

    def _refuse(self, tag: int, error: NormserveError, record: RequestRecord, request_id: str) -> None:
        record.error = error.code
        record.status = status_of(error)
        answer = Answer(status=record.status, request_id=request_id, problem=document(error, request_id))
        if isinstance(error, RetryLaterError):
            answer.retry_after_s = retry_after(error)
        self._send(frames.write(tag, answer))
        self._account(record, request_id)

    def _send(self, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        assert self._wire is not None
        self._wire.send(frame, descriptors)

    def _account(self, record: RequestRecord, request_id: str) -> None:
        if record.error == ClientLeftError.code or self._wire is None or not self._wire.is_open:
            record.status = CLIENT_LEFT
        self._service.metrics.observe_request(record)
        if self._service.is_logged:
            access_log.note(record, self._session.caller, request_id)

    def _request_id(self) -> str:
        # Names, no secrets: the system's source of those takes a call for each.
        return f"{_names.getrandbits(128):032x}"


class _UnderWay:
    """An operation that is to be answered.

    Attributes:
        job, permit: None until it has been admitted.
    """

    __slots__ = ("job", "permit", "record", "request", "request_id", "tag")

    def __init__(self, tag: int, request: Request, record: RequestRecord, request_id: str) -> None:
        self.tag = tag
        self.request = request
        self.record = record
        self.request_id = request_id
        self.job: NormJob | None = None
        self.permit: Permit | None = None


def _lent(memory: memoryview) -> LentSegment | LentDeviceSegment | LentAllocation:
    segment = memory.obj
    assert isinstance(segment, LentSegment | LentDeviceSegment | LentAllocation)
    return segment


def _divided(arena: Arena) -> tuple[list[Lent], list[Lent]]:
    """What the client has allocated itself, and what the server has lent."""
    owned: list[Lent] = []
    lent: list[Lent] = []
    for memory in arena.segments.values():
        segment = _lent(memory)
        (owned if isinstance(segment, LentAllocation) else lent).append(segment)
    return owned, lent
