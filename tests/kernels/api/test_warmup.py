"""Warming up: what it launches is what calls on rows of that length take."""

import fusednorm
import pytest
import torch
from fusednorm.arguments.arrays import Array
from fusednorm.launch import prepared_kernels, replay_cache

DTYPE = torch.bfloat16


class Notes:
    """What each launch would be compiled for, as far as an interpreted kernel tells."""

    def __init__(self, monkeypatch):
        self.kinds = set()
        start = prepared_kernels.launch_kernel

        def note(launch, memories, device):
            kinds = tuple(a.dtype if isinstance(a, Array) else type(a) for a in launch.arguments)
            kind = launch.kernel.fn, kinds, tuple(launch.options.items())
            # Once of each kind: nobody looks at results, and interpreted kernels are slow.
            if kind not in self.kinds:
                self.kinds.add(kind)
                start(launch, memories, device)

        monkeypatch.setattr(prepared_kernels, "launch_kernel", note)

    def new(self, call, *arguments, **options):
        """Whether the call launched anything unseen."""
        before = len(self.kinds)
        call(*arguments, **options)
        return len(self.kinds) > before


@pytest.fixture
def notes(monkeypatch, device):
    # What is known is launched without a note.
    monkeypatch.setattr(replay_cache.ReplayablePass, "record", lambda *_: None)
    return Notes(monkeypatch)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(
    "options",
    [{}, {"residual": True}, {"activation": "silu", "dropout": 0.5}, {"parameter_dtype": torch.float32}],
    ids=lambda options: " ".join(options) or "plain",
)
def test_calls_of_any_rows_take_nothing_but_what_was_warmed_up(op, options, notes, device):
    cols = 80
    fusednorm.warmup(op, DTYPE, cols, device=device, **options)
    count = 2 if op == "layer_norm" else 1
    parameters = [
        torch.randn(cols, device=device, dtype=options.get("parameter_dtype", DTYPE)) for _ in range(count)
    ]
    for rows in (1, 3, 40):
        x = torch.randn(rows, cols, device=device, dtype=DTYPE)
        more = {name: options[name] for name in ("activation", "dropout") if name in options}
        more |= {"residual": torch.randn_like(x)} if "residual" in options else {}
        more |= {"seed": 7} if "dropout" in options else {}
        forward, backward = (getattr(fusednorm, f"{op}_{which}") for which in ("forward", "backward"))
        assert not notes.new(forward, x, *parameters, **more)
        result = forward(x, *parameters, stats=True, **more)
        statistics = {"rstd": result.rstd} | ({"mean": result.mean} if op == "layer_norm" else {})
        assert not notes.new(backward, x, x, *parameters, **more)
        assert not notes.new(backward, x, x, *parameters, **statistics, **more)
    assert notes.new(fusednorm.layer_norm_forward, x.float())


@pytest.mark.parametrize("names", [("scale", "shift"), ("scale", "shift", "gate"), ("gate",)])
def test_samples_take_nothing_but_what_was_warmed_up_and_a_last_step(names, notes, device):
    cols, residual = 80, "gate" in names
    fusednorm.warmup("layer_norm", DTYPE, cols, residual=residual, device=device, **dict.fromkeys(names, True))
    known = set(notes.kinds)
    weight = torch.randn(cols, device=device, dtype=DTYPE)
    for samples in (1, 2, 5):
        x = torch.randn(samples, 3, cols, device=device, dtype=DTYPE)
        wide = torch.randn(samples, 6 * cols, device=device, dtype=DTYPE)
        call = dict(zip(names, wide.chunk(6, -1), strict=False))
        call |= {"residual": x} if residual else {}
        result = fusednorm.layer_norm_forward(x, weight, weight, stats=True, **call)
        saved = {"mean": result.mean, "rstd": result.rstd}
        fusednorm.layer_norm_backward(x, x, weight, weight, **call, **saved)
    later = {kernel.__name__ for kernel, *_ in notes.kinds - known}
    assert later <= {"layer_norm_backward_reduce_samples_kernel", "layer_norm_backward_reduce_kernel"}


def test_inference_needs_no_backward(notes, device):
    fusednorm.warmup("layer_norm", DTYPE, 80, backward=False, device=device)
    x = torch.randn(3, 80, device=device, dtype=DTYPE)
    w = torch.randn(80, device=device, dtype=DTYPE)
    assert not notes.new(fusednorm.layer_norm_forward, x, w, w)
    assert notes.new(fusednorm.layer_norm_backward, x, x, w, w)


@pytest.mark.parametrize(
    ("op", "dtype", "cols", "options"),
    [
        ("batch_norm", DTYPE, 8, {}),
        ("group_norm", DTYPE, 8, {}),
        ("layer_norm", torch.float64, 8, {}),
        ("layer_norm", DTYPE, 0, {}),
        ("layer_norm", DTYPE, -1, {}),
        ("layer_norm", DTYPE, "8", {}),
        ("layer_norm", "float32", 8, {}),
        ("layer_norm", DTYPE, 8, {"parameter_dtype": "float32"}),
        ("layer_norm", DTYPE, 8, {"parameter_dtype": torch.int8}),
        ("layer_norm", DTYPE, 8, {"activation": "tanh"}),
        ("layer_norm", DTYPE, 8, {"dropout": 1.0}),
    ],
)
def test_what_no_launcher_takes_is_refused(op, dtype, cols, options, device):
    with pytest.raises(fusednorm.KernelInputError):
        fusednorm.warmup(op, dtype, cols, device=device, **options)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"residual": True, "activation": "silu"}, {"scale": True, "shift": True, "dropout": 0.5}],
    ids=lambda options: " ".join(options) or "plain",
)
def test_group_norms_of_any_number_of_samples_take_nothing_but_what_was_warmed_up(options, last, notes, device):
    # One group, so that one sample leaves multiprocessors without a program even where there are two of them.
    fusednorm.warmup_group_norm(DTYPE, 1, (8, 3, 4), channels_last=last, device=device, **options)
    weight = torch.randn(8, device=device, dtype=DTYPE)
    for samples in (1, 4):
        x = torch.randn(samples, 8, 3, 4, device=device, dtype=DTYPE)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        of_samples = torch.randn(samples, 8, device=device, dtype=DTYPE)
        more = {name: options[name] for name in ("activation", "dropout") if name in options}
        more |= {"residual": x} if "residual" in options else {}
        more |= {name: of_samples for name in ("scale", "shift") if name in options}
        more |= {"seed": 7} if "dropout" in options else {}
        assert not notes.new(fusednorm.group_norm_forward, x, 1, weight, weight, **more)
        saved = fusednorm.group_norm_forward(x, 1, weight, weight, stats=True, **more)
        statistics = {"mean": saved.mean, "rstd": saved.rstd}
        assert not notes.new(fusednorm.group_norm_backward, x, x, 1, weight, weight, **more)
        assert not notes.new(fusednorm.group_norm_backward, x, x, 1, weight, weight, **statistics, **more)
    assert notes.new(fusednorm.group_norm_forward, x.float(), 1)


def test_few_streamed_samples_take_nothing_but_what_was_warmed_up(notes, device):
    shape = (16, 33, 32)
    fusednorm.warmup_group_norm(DTYPE, 4, shape, channels_last=True, device=device)
    weight = torch.randn(shape[0], device=device, dtype=DTYPE)
    for samples in (1, 2, 3, 9):
        x = torch.randn(samples, *shape, device=device, dtype=DTYPE).contiguous(memory_format=torch.channels_last)
        assert not notes.new(fusednorm.group_norm_forward, x, 4, weight, weight)
        assert not notes.new(fusednorm.group_norm_backward, x, x, 4, weight, weight)


@pytest.mark.parametrize("shape", [(), (0, 4), (4, 0), (5, 4), 8, ("8", 4)])
def test_shapes_without_groups_are_not_warmed_up(shape, device):
    with pytest.raises(fusednorm.KernelInputError):
        fusednorm.warmup_group_norm(DTYPE, 2, shape, device=device)
