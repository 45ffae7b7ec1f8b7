"""Which stage waits for which, on streams that note what is put on them."""

import contextlib
import time
import weakref

import pytest
from normserve.backends.cuda.pipeline import StreamPipeline
from normserve.jobs.job import BatchResult

NAMES = ("in", "compute", "out")


class FakeDevice:
    """Streams that write everything into one log, in the order in which the host put it there."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.streams: list[FakeStream] = []
        self.current: FakeStream | None = None
        self.events = 0
        self.reached = 0

    def make_stream(self):
        made = FakeStream(self, NAMES[len(self.streams) % 3])
        self.streams.append(made)
        return made

    def make_event(self):
        self.events += 1
        return FakeEvent(self, self.events)

    def make_graph_event(self):
        return self.make_event()

    @contextlib.contextmanager
    def use(self, stream):
        self.current = stream
        try:
            yield
        finally:
            self.current = None


class FakeStream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def wait_event(self, event):
        self.device.log.append((self.name, "waits for", event.number))

    def synchronize(self):
        self.device.log.append(("host", "settles", self.name))


class FakeEvent:
    """Its time is its number in seconds."""

    def __init__(self, device, number):
        self.device, self.number = device, number

    def record(self, stream):
        self.device.log.append((stream.name, "reaches", self.number))

    def query(self):
        return self.number <= self.device.reached

    def synchronize(self):
        self.device.log.append(("host", "waits for", self.number))

    def elapsed_time(self, end):
        return 1000.0 * (end.number - self.number)


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def pipeline(device):
    return StreamPipeline(device)


class FakePart:
    """Writes into the device's log what runs where.

    Attributes:
        broken: names of the stages that fail.
    """

    def __init__(self, device, name="x", broken=()):
        self.device, self.name, self.broken = device, name, broken

    def _run(self, stage):
        if stage in self.broken:
            raise MemoryError("dry")
        self.device.log.append((self.device.current.name, f"runs {stage}", self.name))

    def copy_in(self):
        self._run("in")

    def compute(self):
        self._run("compute")

    def copy_out(self):
        self._run("out")


def start(device, pipeline, names="x", broken=None, held=None):
    """A batch of parts of these names, the last of which may be broken."""

    def make_parts():
        assert device.current.name == "in"
        return [FakePart(device, name, broken if name == names[-1] and broken else ()) for name in names]

    return pipeline.start_launches(make_parts, held)


def test_each_stage_is_on_its_stream_behind_the_one_before(device, pipeline):
    start(device, pipeline)
    assert device.log == [
        ("in", "reaches", 1),
        ("in", "runs in", "x"),
        ("in", "reaches", 2),
        ("compute", "waits for", 2),
        ("compute", "reaches", 3),
        ("compute", "runs compute", "x"),
        ("compute", "reaches", 4),
        ("out", "waits for", 4),
        ("out", "reaches", 5),
        ("out", "runs out", "x"),
        ("out", "reaches", 6),
    ]


def test_stages_on_one_stream_wait_for_nothing_and_share_their_moments(device):
    pending = start(device, StreamPipeline(device, apart=False))
    assert device.log == [
        ("in", "reaches", 1),
        ("in", "runs in", "x"),
        ("in", "reaches", 2),
        ("in", "runs compute", "x"),
        ("in", "reaches", 3),
        ("in", "runs out", "x"),
        ("in", "reaches", 4),
    ]
    assert stage_seconds(pending) == (1.0, 1.0, 1.0)
    assert device.log[-1] == ("host", "waits for", 4)


def test_next_batch_comes_in_before_anybody_waits_for_the_last(device, pipeline):
    first = start(device, pipeline, "a")
    second = start(device, pipeline, "b")
    assert not [entry for entry in device.log if entry[0] == "host"]
    # Nothing on the copy-in stream waits, so the second copy runs beside the first one's kernel.
    assert not [entry for entry in device.log if entry[:2] == ("in", "waits for")]
    stage_seconds(first)
    stage_seconds(second)
    assert [entry for entry in device.log if entry[0] == "host"] == [
        ("host", "waits for", 6),
        ("host", "waits for", 12),
    ]


def test_stages_are_timed_without_their_waits(device, pipeline):
    assert stage_seconds(start(device, pipeline)) == (1.0, 1.0, 1.0)


def test_what_was_gathered_on_the_host_counts_as_copied_in(device, pipeline):
    pending = start(device, pipeline)
    pending.set_results(({"y": 1},), (7,), packed_s=0.5, are_placed=True)
    assert pending.wait() == BatchResult(({"y": 1},), (7,), 1.5, 1.0, 1.0, has_filled_buffers=True)


def test_parts_of_a_batch_wait_for_their_own_stages_alone(device, pipeline):
    start(device, pipeline, "ab")
    assert device.log == [
        ("in", "reaches", 1),
        ("in", "runs in", "a"),
        ("in", "reaches", 2),
        ("compute", "waits for", 2),
        ("compute", "runs compute", "a"),
        ("compute", "reaches", 3),
        ("out", "waits for", 3),
        ("out", "runs out", "a"),
        ("in", "runs in", "b"),
        ("in", "reaches", 4),
        ("compute", "waits for", 4),
        ("compute", "runs compute", "b"),
        ("compute", "reaches", 5),
        ("out", "waits for", 5),
        ("out", "runs out", "b"),
        ("out", "reaches", 6),
    ]


def test_stages_of_parts_that_overlap_add_up_to_the_whole(device, pipeline):
    held = Memory()
    alive = weakref.ref(held)
    pending = start(device, pipeline, "ab", held=held)
    del held
    assert alive() is not None
    device.reached = 5
    assert not pending.poll(0)
    device.reached = 6
    assert pending.poll(0)
    # From 1 to 4 parts came, for 1 of which one was computed; the other was computed at 5, and 6 was the end.
    assert stage_seconds(pending) == (2.0, 2.0, 1.0)
    assert alive() is None
    assert not [entry for entry in device.log if entry[0] == "host"]
    # Its events serve the next.
    stage_seconds(start(device, pipeline, "ab"))
    assert device.events == 6
    assert device.log[-1][:2] == ("host", "waits for")


def test_parts_that_are_captured_come_between_what_the_compute_stream_has_and_gets(device, pipeline):
    marks = pipeline.make_part_events(2)
    device.current = device.streams[1]
    pipeline.enqueue_for_capture([FakePart(device, name) for name in "ab"], marks)
    assert device.log == [
        ("compute", "reaches", 5),
        ("in", "waits for", 5),
        ("out", "waits for", 5),
        ("in", "runs in", "a"),
        ("in", "reaches", 1),
        ("in", "reaches", 6),
        ("compute", "waits for", 6),
        ("compute", "runs compute", "a"),
        ("compute", "reaches", 2),
        ("compute", "reaches", 7),
        ("out", "waits for", 7),
        ("out", "runs out", "a"),
        ("in", "runs in", "b"),
        ("in", "reaches", 3),
        ("in", "reaches", 8),
        ("compute", "waits for", 8),
        ("compute", "runs compute", "b"),
        ("compute", "reaches", 4),
        ("compute", "reaches", 9),
        ("out", "waits for", 9),
        ("out", "runs out", "b"),
        ("out", "reaches", 10),
        ("compute", "waits for", 10),
    ]


@pytest.mark.parametrize("broken", NAMES)
def test_a_part_that_fails_settles_the_streams(device, pipeline, broken):
    with pytest.raises(MemoryError):
        start(device, pipeline, "ab", broken)
    assert device.log[-3:] == [("host", "settles", name) for name in NAMES]
    assert device.current is None


def test_stage_alone_takes_two_moments_and_the_others_no_time(device):
    pipeline = StreamPipeline(device, apart=False)
    pending = pipeline.start_single_step(lambda: device.log.append((device.current.name, "runs", "x")), None)
    assert device.log == [("in", "reaches", 1), ("in", "runs", "x"), ("in", "reaches", 2)]
    assert stage_seconds(pending) == (0.0, 1.0, 0.0)


def test_what_is_done_aside_has_the_stream_and_no_moments(device):
    pipeline = StreamPipeline(device)
    pipeline.run_on_compute_stream(lambda: device.log.append((device.current.name, "runs", "aside")))
    assert device.log == [("compute", "runs", "aside")]
    assert device.current is None


def test_events_of_a_batch_that_is_over_serve_the_next(device, pipeline):
    stage_seconds(start(device, pipeline))
    second = start(device, pipeline)
    third = start(device, pipeline)
    assert device.events == 12
    stage_seconds(second)
    stage_seconds(third)


def test_pipeline_is_copying_while_a_batch_with_copies_is_in_flight(device, pipeline):
    assert not pipeline.is_copying
    first, second = start(device, pipeline), start(device, pipeline)
    stage_seconds(first)
    assert pipeline.is_copying
    stage_seconds(second)
    assert not pipeline.is_copying
    alone = pipeline.start_single_step(lambda: None, None)
    assert not pipeline.is_copying
    stage_seconds(alone)


def test_pipeline_is_not_copying_after_a_batch_that_failed_or_was_given_up(device, pipeline):
    with pytest.raises(MemoryError):
        start(device, pipeline, broken="compute")
    assert not pipeline.is_copying
    given_up = start(device, pipeline)
    assert pipeline.is_copying
    del given_up
    assert not pipeline.is_copying


def test_batch_is_watched_for_as_long_as_the_caller_says(device, pipeline):
    pending = start(device, pipeline)
    began = time.perf_counter()
    assert not pending.poll(0.01)
    assert time.perf_counter() - began >= 0.01
    device.reached = 5
    assert not pending.poll(0)
    device.reached = 6
    assert pending.poll(0)
    stage_seconds(pending)
    assert not [entry for entry in device.log if entry[0] == "host"]


class Memory:
    pass


def test_what_the_stages_work_on_lives_until_the_batch_is_over(device, pipeline):
    alive = []

    def make_parts():
        parts = [FakePart(device)]
        alive.append(weakref.ref(parts[0]))
        return parts

    given = Memory()
    alive.append(weakref.ref(given))
    pending = pipeline.start_launches(make_parts, given)
    alone = Memory()
    alive.append(weakref.ref(alone))
    other = pipeline.start_single_step(lambda: None, alone)
    del given, alone
    assert all(memory() is not None for memory in alive)
    stage_seconds(pending)
    stage_seconds(other)
    assert [memory() for memory in alive] == [None, None, None]


def test_parts_that_cannot_be_made_leave_the_stream(device, pipeline):
    with pytest.raises(ZeroDivisionError):
        pipeline.start_launches(lambda: 1 / 0, None)
    assert device.current is None


@pytest.mark.parametrize("broken", NAMES)
def test_failed_stage_settles_the_streams_before_its_memory_is_given_back(device, pipeline, broken):
    with pytest.raises(MemoryError):
        start(device, pipeline, broken=broken)
    assert device.current is None
    assert device.log[-3:] == [("host", "settles", name) for name in NAMES]
    device.log.clear()
    assert stage_seconds(start(device, pipeline))


def test_device_that_cannot_even_settle_raises_its_first_error(device, pipeline):
    def broken():
        raise RuntimeError("second")

    for stream in device.streams:
        stream.synchronize = broken
    with pytest.raises(MemoryError, match="dry"):
        start(device, pipeline, broken="in")


def test_failed_stage_alone_settles_the_streams_as_well(device):
    def fail():
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        StreamPipeline(device, apart=False).start_single_step(fail, None)
    assert ("host", "settles", device.streams[0].name) in device.log


def stage_seconds(pending):
    """Wait for a batch, and how long its stages took."""
    pending.set_results((), (), are_placed=False)
    execution = pending.wait()
    return execution.copy_in_s, execution.kernel_s, execution.copy_out_s
