"""What is launched without Triton's launcher in between, and what is not: the launcher's own and stand-ins."""

from types import SimpleNamespace

import pytest
import triton
from fusednorm.launch.prepared_kernels import find_launcher
from triton.backends.nvidia.driver import CudaLauncher

FUNCTION, METADATA = 11, (4, 1, 0)
HEAD = (FUNCTION, METADATA, None, None, None)


class Flat:
    """Passes parameters one by one, as Triton 3.6's launcher does."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, **attributes):
        self.launched = []
        self.launch = lambda *arguments: self.launched.append(arguments)
        self.__dict__ |= attributes

    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, False, True, None, None, *arguments)


class Packed(Flat):
    """Passes parameters in one tuple, as the launchers of Triton 3.7 to 3.9 do."""

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *parameters):
        self.launch(x, y, z, stream, function, False, True, metadata, None, None, None, b"iO", parameters)


class Reordering(Flat):
    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, *reversed(arguments))


class StreamFirst(Flat):
    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(stream, x, y, z, function, *arguments)


class Twice(Flat):
    def __call__(self, *arguments):
        self.launch(*arguments)
        self.launch(*arguments)


def launch(run, *parameters):
    call, head, packed = find_launcher(run, FUNCTION, METADATA)
    call(9, 8, 7, 70, *head, *((parameters,) if packed else parameters))


@pytest.mark.parametrize("make", [Flat, Packed])
def test_the_driver_gets_what_the_launcher_passes(make):
    through, direct = make(), make()
    parameters = (256, 0, None, 3, 1e-5, (1, 2), "silu")
    through(9, 8, 7, 70, *HEAD, *parameters)
    launch(direct, *parameters)
    assert direct.launched == through.launched
    assert find_launcher(direct, FUNCTION, METADATA).function is direct.launch


@pytest.mark.parametrize("make", [Flat, Packed])
def test_asking_a_launcher_launches_nothing(make):
    run = make()
    own = run.launch
    find_launcher(run, FUNCTION, METADATA)
    assert run.launched == []
    assert run.launch is own


@pytest.mark.parametrize(
    "run",
    [
        Flat(global_scratch_size=64),
        Flat(profile_scratch_size=64),
        Packed(gsan_enabled=True),
        Reordering(),
        StreamFirst(),
        Twice(),
        lambda *arguments: None,
    ],
)
def test_a_launcher_that_does_more_is_called_itself(run):
    assert find_launcher(run, FUNCTION, METADATA) == (run, HEAD, False)


def test_tritons_launcher_is_left_out(monkeypatch):
    # From 3.8 on it looks for the driver, which only scratch memory would need.
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=None))
    launched = []
    run = object.__new__(CudaLauncher)
    run.__dict__ |= {
        "launch": lambda *arguments: launched.append(arguments),
        "num_ctas": 1,
        "global_scratch_size": 0,
        "global_scratch_align": 1,
        "profile_scratch_size": 0,
        "profile_scratch_align": 1,
        "launch_cooperative_grid": True,
        "launch_pdl": False,
        "gsan_enabled": False,
        "arg_annotations": ["annotations"],
        "kernel_signature": b"signature",
    }
    launch(run, 256, None, 3)
    run(9, 8, 7, 70, *HEAD, 256, None, 3)
    assert launched[0] == launched[1]
    assert find_launcher(run, FUNCTION, METADATA).function is run.launch
