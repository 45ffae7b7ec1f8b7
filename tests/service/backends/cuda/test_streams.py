"""Which stage waits for which, on streams that note what is put on them."""

import contextlib
import time
import weakref

import pytest
from normserve.backends.cuda.streams import Pipeline

NAMES = ("in", "compute", "out")


class FakeDevice:
    """Streams that write everything into one log, in the order in which the host put it there."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.streams: list[FakeStream] = []
        self.current: FakeStream | None = None
        self.events = 0
        self.reached = 0

    def stream(self):
        made = FakeStream(self, NAMES[len(self.streams) % 3])
        self.streams.append(made)
        return made

    def event(self):
        self.events += 1
        return FakeEvent(self, self.events)

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
    return Pipeline(device)


def stages(device, label=""):
    def stage(name):
        def run(value):
            device.log.append((device.current.name, f"runs{label}", value))
            return f"{value}>{name}"

        return run

    return [stage(name) for name in NAMES]


def test_each_stage_is_on_its_stream_behind_the_one_before(device, pipeline):
    flight = pipeline.start(*stages(device), first="x")
    assert flight.value == "x>in>compute>out"
    assert device.log == [
        ("in", "reaches", 1),
        ("in", "runs", "x"),
        ("in", "reaches", 2),
        ("compute", "waits for", 2),
        ("compute", "reaches", 3),
        ("compute", "runs", "x>in"),
        ("compute", "reaches", 4),
        ("out", "waits for", 4),
        ("out", "reaches", 5),
        ("out", "runs", "x>in>compute"),
        ("out", "reaches", 6),
    ]


def test_stages_on_one_stream_wait_for_nothing_and_share_their_moments(device):
    flight = Pipeline(device, apart=False).start(*stages(device), first="x")
    assert device.log == [
        ("in", "reaches", 1),
        ("in", "runs", "x"),
        ("in", "reaches", 2),
        ("in", "runs", "x>in"),
        ("in", "reaches", 3),
        ("in", "runs", "x>in>compute"),
        ("in", "reaches", 4),
    ]
    took = flight.wait()
    assert device.log[-1] == ("host", "waits for", 4)
    assert (took.copy_in, took.compute, took.copy_out) == (1.0, 1.0, 1.0)


def test_next_batch_comes_in_before_anybody_waits_for_the_last(device, pipeline):
    first = pipeline.start(*stages(device, " 1"), first="a")
    second = pipeline.start(*stages(device, " 2"), first="b")
    assert not [entry for entry in device.log if entry[0] == "host"]
    # Nothing on the copy-in stream waits, so the second copy runs beside the first one's kernel.
    assert not [entry for entry in device.log if entry[:2] == ("in", "waits for")]
    first.wait()
    second.wait()
    assert [entry for entry in device.log if entry[0] == "host"] == [
        ("host", "waits for", 6),
        ("host", "waits for", 12),
    ]


def test_stages_are_timed_without_their_waits(device, pipeline):
    took = pipeline.start(*stages(device)).wait()
    assert (took.copy_in, took.compute, took.copy_out) == (1.0, 1.0, 1.0)


def stages_of_parts(device):
    def stage(part):
        device.log.append((device.current.name, "runs", part))

    return stage, stage, stage


def test_parts_of_a_batch_wait_for_their_own_stages_alone(device, pipeline):
    pipeline.start_parts(*stages_of_parts(device), parts="ab", held=None)
    assert device.log == [
        ("in", "reaches", 1),
        ("in", "runs", "a"),
        ("in", "reaches", 2),
        ("compute", "waits for", 2),
        ("compute", "runs", "a"),
        ("compute", "reaches", 3),
        ("out", "waits for", 3),
        ("out", "runs", "a"),
        ("in", "runs", "b"),
        ("in", "reaches", 4),
        ("compute", "waits for", 4),
        ("compute", "runs", "b"),
        ("compute", "reaches", 5),
        ("out", "waits for", 5),
        ("out", "runs", "b"),
        ("out", "reaches", 6),
    ]


def test_stages_of_parts_that_overlap_add_up_to_the_whole(device, pipeline):
    held = Memory()
    alive = weakref.ref(held)
    flight = pipeline.start_parts(*stages_of_parts(device), parts="ab", held=held)
    del held
    assert alive() is not None
    device.reached = 5
    assert not flight.lands_within(0)
    device.reached = 6
    assert flight.lands_within(0)
    took = flight.wait()
    # From 1 to 4 parts came, for 1 of which one was computed; the other was computed at 5, and 6 was the end.
    assert (took.copy_in, took.compute, took.copy_out) == (2.0, 2.0, 1.0)
    assert alive() is None
    assert not [entry for entry in device.log if entry[0] == "host"]
    # Its events serve the next.
    pipeline.start_parts(*stages_of_parts(device), parts="ab", held=None).wait()
    assert device.events == 6
    assert device.log[-1][:2] == ("host", "waits for")


@pytest.mark.parametrize("broken", range(3))
def test_a_part_that_fails_settles_the_streams(device, pipeline, broken):
    def fail(part):
        if part == "b":
            raise MemoryError("dry")

    three = list(stages_of_parts(device))
    three[broken] = fail
    with pytest.raises(MemoryError):
        pipeline.start_parts(*three, parts="ab", held=None)
    assert device.log[-3:] == [("host", "settles", name) for name in NAMES]
    assert device.current is None


def test_stage_alone_takes_two_moments_and_the_others_no_time(device):
    _, compute, _ = stages(device)
    flight = Pipeline(device, apart=False).start_one(compute, "x")
    assert flight.value == "x>compute"
    assert device.log == [("in", "reaches", 1), ("in", "runs", "x"), ("in", "reaches", 2)]
    took = flight.wait()
    assert (took.copy_in, took.compute, took.copy_out) == (0.0, 1.0, 0.0)


def test_what_is_done_aside_has_the_stream_and_no_moments(device):
    pipeline = Pipeline(device)
    pipeline.aside(lambda: device.log.append((device.current.name, "runs", "aside")))
    assert device.log == [("compute", "runs", "aside")]
    assert device.current is None


def test_events_of_a_flight_that_is_over_serve_the_next(device, pipeline):
    pipeline.start(*stages(device)).wait()
    second = pipeline.start(*stages(device))
    third = pipeline.start(*stages(device))
    assert device.events == 12
    second.wait()
    third.wait()


def test_flight_is_watched_for_as_long_as_the_caller_says(device, pipeline):
    flight = pipeline.start(*stages(device))
    began = time.perf_counter()
    assert not flight.lands_within(0.01)
    assert time.perf_counter() - began >= 0.01
    device.reached = 5
    assert not flight.lands_within(0)
    device.reached = 6
    assert flight.lands_within(0)
    flight.wait()
    assert not [entry for entry in device.log if entry[0] == "host"]


class Memory:
    pass


def test_memory_of_every_stage_lives_until_the_flight_is_over(pipeline):
    alive = []

    def stage(_):
        memory = Memory()
        alive.append(weakref.ref(memory))
        return memory

    given = Memory()
    alive.append(weakref.ref(given))
    flight = pipeline.start(stage, stage, stage, first=given)
    del given
    assert all(memory() is not None for memory in alive)
    flight.wait()
    # The last one is the flight's value.
    assert [memory() is not None for memory in alive] == [False, False, False, True]


@pytest.mark.parametrize("broken", range(3))
def test_failed_stage_leaves_its_stream(device, pipeline, broken):
    three = stages(device)
    three[broken] = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pipeline.start(*three)
    assert device.current is None


@pytest.mark.parametrize("broken", range(3))
def test_failed_stage_settles_the_streams_before_its_memory_is_given_back(device, pipeline, broken):
    def fail(_):
        raise MemoryError("dry")

    three = stages(device)
    three[broken] = fail
    with pytest.raises(MemoryError):
        pipeline.start(*three)
    assert device.log[-3:] == [("host", "settles", name) for name in NAMES]
    device.log.clear()
    assert pipeline.start(*stages(device)).wait()


def test_device_that_cannot_even_settle_raises_its_first_error(device, pipeline):
    def fail(_):
        raise RuntimeError("first")

    def broken():
        raise RuntimeError("second")

    for stream in device.streams:
        stream.synchronize = broken
    with pytest.raises(RuntimeError, match="first"):
        pipeline.start(fail, fail, fail)


def test_failed_stage_alone_settles_the_streams_as_well(device):
    def fail(_):
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        Pipeline(device, apart=False).start_one(fail, "x")
    assert ("host", "settles", device.streams[0].name) in device.log
