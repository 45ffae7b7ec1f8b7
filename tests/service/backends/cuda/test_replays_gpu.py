"""Small jobs that recur in registered memory, replayed by the CUDA backend; needs a GPU.

An equal job that does not recur is computed by the same kernels and never replayed: its bits are the right ones.
"""

import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from math import prod

import pytest
import torch
from fusednorm import reference
from normserve.backends.cuda import graph_cache
from normserve.backends.cuda.graph_cache import CudaGraphCapturer
from normserve.jobs.job import Batch, ChannelLayout, NormJob, NormSpec, Op, PassDirection, ReplaySlot
from normserve.jobs.result_specs import infer_result_specs
from normserve.memory.host_segments import HostSegment, make_segment
from normserve.memory.slabs import SlabPool
from normserve.memory.tensors import HostTensor

from tests.service.backends.answers import assert_right
from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import DTYPES, back, host

pytestmark = pytest.mark.gpu

SOON = graph_cache._CALLS_BEFORE_CAPTURE


class Counting:
    """Graphs of a device, counted.

    Attributes:
        captured: how many there were.
        replayed: how often any was.
    """

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self._graphs = CudaGraphCapturer()

    def capture(self, call):
        graph = self._graphs.capture(call)
        self.captured += 1
        return CountedGraph(self, graph)


class CountedGraph:
    def __init__(self, counting, graph):
        self.counting, self.graph = counting, graph

    def replay(self):
        self.graph.replay()
        self.counting.replayed += 1


@pytest.fixture(scope="module")
def backend():
    from normserve.backends.cuda.backend import TritonBackend

    made = TritonBackend(SlabPool(max_idle_bytes=2**26), warm_sizes=())
    made.start()
    return made


@pytest.fixture
def graphs(backend, monkeypatch):
    counting = Counting()
    monkeypatch.setattr(backend._graph_cache, "_graphs", counting)
    return counting


@pytest.fixture(scope="module")
def memory(backend):
    """Memory of a client, registered with the driver."""
    descriptor, segment = make_segment(2**22, HostSegment)
    os.close(descriptor)
    made = memoryview(segment)
    registration = backend.register_host_memory(made)
    assert registration is not None
    yield made
    del registration


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(17)


def computed(backend, job: NormJob) -> dict[str, torch.Tensor]:
    (outputs,) = backend.run(Batch((job,))).wait().results
    return {name: back(tensor) for name, tensor in outputs.items()}


class Caller:
    """A client that sends the same request again, with other numbers in the same memory."""

    def __init__(self, backend, memory, spec=None, registered=None):
        self.backend, self.memory = backend, memory
        self.spec = spec or LAYER_NORM
        self.registered = registered
        self.recurrence = ReplaySlot()

    def call(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Its results, computed where they are."""
        taken = 0

        def take(nbytes: int) -> memoryview:
            nonlocal taken
            place = self.memory[taken : taken + nbytes]
            taken += -(-nbytes // 256) * 256
            return place

        given = {}
        for name, tensor in tensors.items():
            place = take(tensor.nbytes)
            torch.frombuffer(place, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
            given[name] = HostTensor(DTYPES[tensor.dtype], tuple(tensor.shape), place)
        described = {name: (tensor.dtype, tensor.shape) for name, tensor in given.items()}
        places = {
            name: take(dtype.itemsize * prod(shape))
            for name, (dtype, shape) in infer_result_specs(self.spec, described, self.registered).items()
        }
        job = NormJob(self.spec, given, self.registered, result_buffers=places, replay_slot=self.recurrence)
        self.recurrence.is_unbatched = self.backend.is_better_unbatched(job)
        assert self.recurrence.is_unbatched
        return computed(self.backend, job)


def right(spec: NormSpec, tensors: dict[str, torch.Tensor]):
    """What the oracle says, in float64."""

    def first(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim(-1, 1) if spec.layout is ChannelLayout.NHWC and tensor.dim() > 2 else tensor

    names = ("x",) if spec.direction is PassDirection.FORWARD else ("dy", "x")
    given = [first(tensors[name]) for name in names] + ([spec.num_groups] if spec.num_groups else [])
    options = {name: first(tensor) for name, tensor in tensors.items() if name not in names}
    if spec.stats:
        options["stats"] = True
    if spec.is_over_channels:
        options["layout"] = "nchw"
    function = getattr(reference, f"{spec.op.value}_{spec.direction.value}")
    return function(*given, **options, eps=spec.eps, activation=spec.activation, precision=torch.float64)


LAYER_NORM = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)
GRADIENTS = NormSpec(Op.LAYER_NORM, PassDirection.BACKWARD, 1e-5)
RMS_NORM = NormSpec(Op.RMS_NORM, PassDirection.FORWARD, 1e-6, activation="silu", stats=True)
BF16, FP32 = torch.bfloat16, torch.float32


def group_norm(direction: PassDirection, layout: ChannelLayout) -> NormSpec:
    return NormSpec(Op.GROUP_NORM, direction, 1e-5, 2, layout, activation="silu")


def over_channels(direction: PassDirection) -> NormSpec:
    return NormSpec(Op.LAYER_NORM, direction, 1e-5, layout=ChannelLayout.NCHW, activation="silu")


# The spec, x's shape and dtype, and whether a layer's parameters are registered.
CLASSES = {
    "a row": (LAYER_NORM, (1, 4096), BF16, True),
    "a long row": (LAYER_NORM, (1, 60_000), BF16, False),
    "rows": (RMS_NORM, (5, 1000), FP32, False),
    "gradients of a layer": (GRADIENTS, (24, 1024), FP32, True),
    "a small sample": (group_norm(PassDirection.FORWARD, ChannelLayout.NCHW), (1, 32, 8, 8), BF16, True),
    "a large sample": (group_norm(PassDirection.FORWARD, ChannelLayout.NCHW), (1, 32, 40, 40), BF16, False),
    "a small sample, channels last": (
        group_norm(PassDirection.FORWARD, ChannelLayout.NHWC),
        (1, 8, 8, 32),
        BF16,
        False,
    ),
    "a large sample, channels last": (
        group_norm(PassDirection.FORWARD, ChannelLayout.NHWC),
        (1, 40, 40, 32),
        BF16,
        True,
    ),
    "gradients of a sample": (group_norm(PassDirection.BACKWARD, ChannelLayout.NCHW), (1, 32, 40, 40), BF16, True),
    "channels of a sample": (over_channels(PassDirection.FORWARD), (1, 32, 8, 8), BF16, True),
    "gradients of channels": (over_channels(PassDirection.BACKWARD), (1, 32, 40, 40), BF16, True),
    "gradients, channels last": (
        group_norm(PassDirection.BACKWARD, ChannelLayout.NHWC),
        (1, 40, 40, 32),
        BF16,
        True,
    ),
}


@pytest.mark.parametrize(("spec", "shape", "dtype", "has_layer"), CLASSES.values(), ids=CLASSES)
def test_every_replay_is_right_and_has_the_calls_bits(backend, graphs, memory, spec, shape, dtype, has_layer):
    size = 32 if spec.layout else shape[-1]
    parameters, registered = {}, None
    if has_layer:
        parameters = {"weight": torch.randn(size), "bias": torch.randn(size)}
        resident = backend.load_parameters(spec.op, host(parameters["weight"]), host(parameters["bias"]))
        registered = layer(op=spec.op, size=size, num_groups=spec.num_groups, backend_parameters=resident)
    names = ("x", "residual") if spec.direction is PassDirection.FORWARD else ("x", "dy")
    caller = Caller(backend, memory, spec, registered)
    for number in range(SOON + 50):
        tensors = {name: torch.randn(shape).to(dtype) for name in names}
        got = caller.call(tensors)
        if 5 < number < SOON - 5:
            continue
        assert_right(got, right(spec, tensors | parameters), spec.layout is ChannelLayout.NHWC)
        called = computed(
            backend, NormJob(spec, {name: host(tensor) for name, tensor in tensors.items()}, registered)
        )
        for name in got:
            assert torch.equal(got[name], called[name]), (name, number)
    assert graphs.captured == 1
    assert graphs.replayed == 50


def test_layers_take_turns(backend, graphs, memory):
    layers = []
    for _ in range(2):
        weight, bias = torch.randn(2, 768)
        resident = backend.load_parameters(Op.LAYER_NORM, host(weight), host(bias))
        caller = Caller(backend, memory, registered=layer(size=768, backend_parameters=resident))
        layers.append((weight, bias, caller))
    for number in range(SOON + 20):
        for weight, bias, caller in layers:
            x = torch.randn(2, 768)
            got = caller.call({"x": x})
            if number > SOON - 5:
                assert_right(got, right(LAYER_NORM, {"x": x, "weight": weight, "bias": bias}), False)
    assert (graphs.captured, graphs.replayed) == (2, 40)


def test_layer_that_is_deleted_is_freed_and_another_takes_its_place(backend, graphs, memory):
    gone = []
    for turn in range(3):
        weight, bias = torch.randn(2, 640)
        resident = backend.load_parameters(Op.LAYER_NORM, host(weight), host(bias))
        caller = Caller(backend, memory, registered=layer(size=640, backend_parameters=resident))
        for number in range(SOON + 10):
            x = torch.randn(3, 640)
            got = caller.call({"x": x})
            if not 2 < number < SOON - 2:
                assert_right(got, right(LAYER_NORM, {"x": x, "weight": weight, "bias": bias}), False)
        assert (graphs.captured, graphs.replayed) == (turn + 1, 10 * (turn + 1))
        gone += [weakref.ref(resident), weakref.ref(resident.weight)]
        del resident, caller
        gc.collect()
        # The next one's parameters most likely lie where these did.
        assert [each() for each in gone] == [None] * len(gone)


def test_captures_beside_a_thread_that_allocates_and_waits(backend, graphs, memory):
    stop = threading.Event()

    def work() -> int:
        rounds = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            held = []
            while not stop.is_set():
                # More and more, so that torch asks the driver for it.
                held.append(
                    torch.full((2**18 + 2**16 * (rounds % 64),), rounds, dtype=torch.float32, device="cuda")
                )
                assert (held[-1] == rounds).all()
                torch.cuda.current_stream().synchronize()
                del held[:-50]
                rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as other:
        rounds = other.submit(work)
        try:
            for rows in range(1, 9):
                caller = Caller(backend, memory)
                for number in range(SOON + 5):
                    x = torch.randn(rows, 512)
                    got = caller.call({"x": x})
                    if number > SOON - 3:
                        assert_right(got, right(LAYER_NORM, {"x": x}), False)
        finally:
            stop.set()
        assert rounds.result() > 8
    assert (graphs.captured, graphs.replayed) == (8, 40)


def test_capture_whose_call_fails_leaves_the_stream_as_it_was():
    graphs = CudaGraphCapturer()
    with torch.cuda.stream(torch.cuda.Stream()):
        counted = torch.zeros(1, device="cuda")

        def count() -> None:
            counted.add_(1)

        def count_and_fail() -> None:
            count()
            raise KeyError("of the call")

        count()
        with pytest.raises(KeyError, match="of the call"):
            graphs.capture(count_and_fail)
        count()
        graph = graphs.capture(count)
        assert counted.item() == 2
        for _ in range(3):
            graph.replay()
        assert counted.item() == 5


def test_pool_is_another_once_all_graphs_of_one_are_gone():
    graphs = CudaGraphCapturer()
    with torch.cuda.stream(torch.cuda.Stream()):
        out = torch.zeros(3, device="cuda")

        def add() -> None:
            # Takes memory meanwhile.
            out.add_(torch.ones(3, device="cuda"))

        for _ in range(3):
            first, second = graphs.capture(add), graphs.capture(add)
            assert first.pool() == second.pool()
            first.replay()
            second.replay()
            del first
            second.replay()
            del second
        assert out.tolist() == [9, 9, 9]
