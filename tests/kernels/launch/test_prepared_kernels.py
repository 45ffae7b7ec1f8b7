"""How launches find their compiled kernel again, with a compiler and a driver that only take notes."""

from types import SimpleNamespace

import pytest
import torch
from fusednorm.launch import prepared_kernels
from fusednorm.launch.launches import Launch
from fusednorm.launch.memories import PlanTensors
from fusednorm.tensors.arrays import describe_as_array
from triton import knobs
from triton.compiler import CompiledKernel

FLOATS = torch.zeros(64)
OPTIONS = {"num_warps": 4, "BLOCK": 128, "EVEN": True}


class Compiled(CompiledKernel):
    """What Triton returns from a launch; `launched` notes what is launched without it."""

    function, packed_metadata, module = 11, (4, 1, 0), None

    def __init__(self):
        self.launched = []

    @property
    def run(self):
        return lambda *arguments: self.launched.append(arguments)


class Kernel:
    """A jit function; `asked` notes the launches that go through Triton."""

    def __init__(self, make_compiled=Compiled):
        self.fn = lambda: None
        self.make_compiled = make_compiled
        self.asked, self.compiled = [], []
        self.params = [
            SimpleNamespace(name=name, do_not_specialize=not looked_at, annotation_type=declared)
            for name, looked_at, declared in (
                ("x_ptr", True, None),
                ("pair", True, None),
                ("rows", False, "i64"),
                ("width", False, None),
                ("value", True, None),
                ("eps", True, "fp32"),
                ("EVEN", False, None),
                ("BLOCK", False, None),
            )
        ]

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.asked.append((grid, arguments, options))
            self.compiled.append(self.make_compiled())
            return self.compiled[-1]

        return launch

    def launch(self, grid=(3,), options=OPTIONS, **changed):
        arguments = {"x": FLOATS, "pair": (FLOATS, None), "rows": 7, "width": 5, "value": 3, "eps": 1e-5} | changed
        tensors = {}
        return Launch(
            self, grid, tuple(described(value, tensors) for value in arguments.values()), options
        ), tensors

    def start(self, device=2, **changed):
        launch, tensors = self.launch(**changed)
        prepared_kernels.launch_kernel(launch, PlanTensors(FLOATS.device, tensors), device)


def described(value, tensors):
    if isinstance(value, tuple):
        return tuple(described(item, tensors) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    name = str(len(tensors))
    tensors[name] = value
    return describe_as_array(name, value)


@pytest.fixture(autouse=True)
def compiling(monkeypatch):
    monkeypatch.setattr(prepared_kernels, "INTERPRETED", False)
    monkeypatch.setattr(prepared_kernels, "_PREPARED", {})
    active = SimpleNamespace(get_current_stream=lambda device: 70 + device)
    monkeypatch.setattr(prepared_kernels, "driver", SimpleNamespace(active=active))


def test_the_second_launch_hands_every_parameter_to_the_driver_in_order():
    kernel, other = Kernel(), torch.ones(64)
    kernel.start()
    assert kernel.asked == [
        ((3,), (FLOATS, (FLOATS, None), 7, 5, 3, 1e-5), {"enable_fp_fusion": True, **OPTIONS}),
    ]
    kernel.start(grid=(9, 2), x=other, rows=1000, width=6, eps=1e-6)
    assert len(kernel.asked) == 1
    pair = (FLOATS.data_ptr(), None)
    assert kernel.compiled[0].launched == [
        (9, 2, 1, 72, 11, (4, 1, 0), None, None, None, other.data_ptr(), pair, 1000, 6, 3, 1e-6, True, 128),
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"x": FLOATS.half()},
        {"x": FLOATS[1:]},
        {"x": None},
        {"pair": (None, FLOATS)},
        {"pair": (FLOATS, FLOATS)},
        {"width": 2**40},
        {"width": 2**63},
        {"value": 1},
        {"value": 16},
        {"value": True},
        {"options": OPTIONS | {"BLOCK": 256}},
        {"options": OPTIONS | {"maxnreg": 64}},
        {"device": 1},
    ],
)
def test_what_triton_looks_at_is_asked_of_it_once(changed):
    kernel = Kernel()
    kernel.start()
    kernel.start(**changed)
    kernel.start(**changed)
    kernel.start()
    assert len(kernel.asked) == 2
    assert [len(compiled.launched) for compiled in kernel.compiled] == [1, 1]


def test_kernels_are_told_apart():
    first, second = Kernel(), Kernel()
    first.start()
    second.start()
    assert len(second.asked) == 1


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_whoever_watches_launches_sees_them(name, monkeypatch):
    kernel = Kernel()
    kernel.start()
    hooks = getattr(knobs.runtime, name)
    hooks.add(print)
    try:
        kernel.start()
    finally:
        hooks.remove(print)
    assert len(kernel.asked) == 2
    kernel.start()
    assert len(kernel.asked) == 2

    monkeypatch.setattr(knobs.runtime, name, print)
    kernel.start()
    assert len(kernel.asked) == 3


@pytest.mark.parametrize(
    ("knob", "name", "value"),
    [
        (knobs.runtime, "debug", True),
        (knobs.runtime, "add_stages_inspection_hook", print),
        (knobs.compilation, "instrumentation_mode", "gsan"),
    ],
)
def test_kernels_that_shall_be_compiled_otherwise_are_neither_taken_nor_kept(knob, name, value, monkeypatch):
    kernel = Kernel()
    with monkeypatch.context() as patch:
        patch.setattr(knob, name, value)
        kernel.start()
        kernel.start()
    assert len(kernel.asked) == 2
    kernel.start()
    assert len(kernel.asked) == 3
    kernel.start()
    assert [len(compiled.launched) for compiled in kernel.compiled] == [0, 0, 1]


def test_what_is_still_being_compiled_is_not_kept():
    kernel = Kernel(make_compiled=object)
    kernel.start()
    kernel.start()
    assert len(kernel.asked) == 2


def test_the_interpreter_launches_everything_itself(monkeypatch):
    monkeypatch.setattr(prepared_kernels, "INTERPRETED", True)
    kernel = Kernel()
    kernel.start()
    kernel.start()
    assert len(kernel.asked) == 2
    assert prepared_kernels.find_prepared(kernel.launch()[0], 2) is None


def test_a_kernel_is_found_where_it_was_launched():
    kernel = Kernel()
    launch, _ = kernel.launch()
    assert prepared_kernels.find_prepared(launch, 2) is None
    kernel.start()
    assert prepared_kernels.find_prepared(launch, 2).compiled_kernel is kernel.compiled[0]
    assert prepared_kernels.find_prepared(launch, 1) is None
