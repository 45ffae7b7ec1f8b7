"""Every combination of what is optional in a request, with the oracle's answer in float64."""

import functools
import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from fusednorm import reference
from fusednorm.results import Backward, Forward
from normserve.codec.api_names import OF_SAMPLES
from normserve.jobs.job import LAYER_OPS, ChannelLayout, NormJob, NormSpec, Op, PassDirection
from normserve.memory.tensors import DType

from tests.service.backends.answers import assert_right
from tests.service.memory.host_tensors import DTYPES, back, host

GROUPS = 2
EPILOGUES = (
    {},
    {"activation": "silu"},
    {"dropout": 0.4, "seed": 5},
    {"activation": "gelu", "dropout": 0.4, "seed": -3},
    {"activation": "leaky_relu", "negative_slope": -0.75},
)

#: The most combinations of one kind.
MOST_COMBINATIONS = 3 * 2**6

#: Operation, pass, dtype and layout: what `combinations` takes.
KINDS = [
    (op, direction, dtype, layout)
    for op, direction, dtype in product(LAYER_OPS, PassDirection, DTYPES)
    for layout in (ChannelLayout if op is Op.GROUP_NORM else (None, ChannelLayout.NCHW))
]


class Combination(NamedTuple):
    """A request and what is right.

    Attributes:
        given: names of the optional tensors that came, and what else was asked for.
        compute_right: the oracle, which takes longer than the backends.
    """

    given: str
    job: NormJob
    compute_right: Callable[[], Forward | Backward]


def combinations(
    op: Op,
    direction: PassDirection,
    dtype: torch.dtype,
    layout: ChannelLayout | None,
    chosen: range = range(MOST_COMBINATIONS),
) -> Iterator[Combination]:
    """Each subset of the optional tensors with each choice of statistics and out_dtype, the epilogues in turn.

    Args: chosen: the numbers of those that are made.
    """
    parameters = ("weight",) if op is Op.RMS_NORM else ("weight", "bias")
    statistics = ("rstd",) if op is Op.RMS_NORM else ("mean", "rstd")
    optional: list[tuple[str, ...]] = [(name,) for name in (*parameters, "scale", "shift")]
    options: list[dict[str, object]] = [{}]
    if direction is PassDirection.BACKWARD:
        optional += [statistics, ("dresidual_out",)]
    else:
        other = DType.BFLOAT16 if dtype is torch.float32 else DType.FLOAT32
        options = [{"stats": stats, "out_dtype": out} for stats, out in product((False, True), (None, other))]
    # A gate needs a residual.
    of_sum = ((), ("residual",)) if op is Op.GROUP_NORM else ((), ("residual",), ("residual", "gate"))
    subsets = product(*[((), names) for names in optional], of_sum)
    for number, (names, asked) in enumerate(product([sum(each, ()) for each in subsets], options)):
        if number not in chosen:
            continue
        # The number's own digits would pair each epilogue with the same tensors again and again.
        epilogue = EPILOGUES[number.bit_count() % len(EPILOGUES)]
        choices = random.Random(number)
        is_adaptive = not {*OF_SAMPLES}.isdisjoint(names)
        heads = layout is None and not is_adaptive and choices.random() < 0.4
        if "weight" in names and op is not Op.GROUP_NORM:
            asked = asked | {"weight_offset": float(choices.random() < 0.4)}
        if asked.get("out_dtype") and layout is None and not heads and choices.random() < 0.5:
            asked = asked | {"out_dtype": DType.FLOAT8_E4M3FN}
        of_residual = choices.choice((dtype, torch.float32, torch.bfloat16))
        groups = GROUPS if op is Op.GROUP_NORM else 0
        spec = NormSpec(op, direction, 1e-3, groups, layout, **asked, **epilogue)
        yield _combination(spec, names, dtype, heads, of_residual)


def assert_all_right(answers: Iterator[tuple[Combination, dict[str, torch.Tensor]]]) -> int:
    """How many there were."""
    count = 0
    for combination, got in answers:
        try:
            # Of 16-bit x GroupNorm takes the hardware's tanh, which gradients of float32 parameters see.
            least = (
                2**-12 if combination.job.spec.op is Op.GROUP_NORM and combination.job.x.dtype.itemsize == 2 else 0
            )
            assert_right(got, combination.compute_right(), combination.job.spec.layout is ChannelLayout.NHWC, least)
        except AssertionError as error:
            raise AssertionError(f"{combination.given}: {error}") from error
        count += 1
    return count


def answer(backend, combination: Combination) -> dict[str, torch.Tensor]:
    """What a backend makes of it."""
    execution = backend(combination.job)
    return {name: back(tensor) for name, tensor in execution.results[0].items()}


def _combination(
    spec: NormSpec, names: tuple[str, ...], dtype: torch.dtype, heads: bool, of_residual: torch.dtype
) -> Combination:
    grouped, moved = spec.op is Op.GROUP_NORM, spec.layout is ChannelLayout.NHWC
    is_adaptive = not {*OF_SAMPLES}.isdisjoint(names)
    has_channels = spec.layout is not None
    shape = (2, 4, 3, 2) if has_channels else (3, 2, 6) if heads or is_adaptive else (3, 6)
    size = shape[1:2] if has_channels else shape[-2:] if heads else shape[-1:]

    def like_x() -> torch.Tensor:
        tensor = torch.randn(shape).to(dtype)
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if moved else tensor

    tensors = {"x": like_x()} | ({"dy": like_x()} if spec.direction is PassDirection.BACKWARD else {})
    tensors |= {name: like_x() for name in ("residual", "dresidual_out") if name in names}
    if "residual" in names:
        tensors["residual"] = tensors["residual"].to(of_residual)
    # Parameters are of another type than x, and of one another's.
    others = {"weight": torch.float32, "bias": torch.bfloat16, "scale": torch.float16, "shift": torch.float32}
    others["gate"] = torch.bfloat16
    for name in others:
        if name in names:
            of = size if name in ("weight", "bias") else (shape[0], *size)
            tensors[name] = torch.randn(of).to(others[name])
    function = f"{spec.op.value}_"
    options = {name: tensor for name, tensor in tensors.items() if name not in ("x", "dy")}
    options |= {"eps": spec.eps, "activation": spec.activation, "dropout": spec.dropout, "seed": spec.seed}
    options["negative_slope"] = spec.negative_slope
    groups = [spec.num_groups] if grouped else []
    layout = {"layout": "nchw"} if spec.is_over_channels else {}
    options |= layout
    if not grouped:
        options["weight_offset"] = spec.weight_offset
    if "rstd" in names:
        saved = {name: tensors[name] for name in ("residual", "gate") if name in names}
        said = getattr(reference, function + "forward")(
            tensors["x"], *groups, eps=spec.eps, stats=True, **saved, **layout
        )
        tensors |= {name: getattr(said, name) for name in ("mean", "rstd") if name in names}
    if spec.direction is PassDirection.FORWARD:
        out = None if spec.out_dtype is None else getattr(torch, spec.out_dtype.value)
        right = getattr(reference, function + "forward")
        given = functools.partial(right, tensors["x"], *groups, **options, out_dtype=out, stats=spec.stats)
    else:
        right = getattr(reference, function + "backward")
        given = functools.partial(right, tensors["dy"], tensors["x"], *groups, **options)
    laid_out = {n: t.movedim(1, -1) if moved and t.dim() > 2 else t for n, t in tensors.items()}
    job = NormJob(spec, {name: host(tensor) for name, tensor in laid_out.items()})
    asked = (
        spec.activation,
        spec.negative_slope,
        f"p {spec.dropout}",
        spec.out_dtype,
        spec.stats,
        spec.weight_offset,
    )
    text = f"{', '.join(names) or 'nothing'}; x {shape}, residual {of_residual}; {asked}"
    return Combination(text, job, functools.partial(given, precision=torch.float64))
