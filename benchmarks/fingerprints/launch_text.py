"""Launches as text, and as a hash for each kernel."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from fusednorm.arguments.arrays import Array, Workspace
from fusednorm.launch.launches import Launch

from benchmarks.fingerprints.cases import PlannedCase

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "f8", "int64": "i64"}

REFUSED = "refused"
"""Used for a call that has no launches."""


def summarise_launches(plans: Iterable[PlannedCase]) -> dict[str, str]:
    """For each kernel, the number of its launches and a hash of their cases, grids, arguments and options."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for planned in plans:
        for place, (launch, roles) in enumerate(_iterate_with_roles(planned)):
            words = (*_format_arguments(launch, roles), *_format_options(launch, names=False))
            text = f"{planned.case.name} #{place} {launch.grid} {' '.join(words)}"
            texts[launch.kernel.fn.__name__].append(text)
    return {kernel: f"{len(each)} launches {_hash_lines(each)}" for kernel, each in texts.items()}


def format_case(planned: PlannedCase) -> str:
    """The case and a line for each of its launches, with the names of kernels and parameters."""
    lines = [planned.case.name if planned.launches is not None else f"{planned.case.name}: {REFUSED}"]
    for launch, roles in _iterate_with_roles(planned):
        grid = ",".join(map(str, launch.grid))
        words = (*_format_arguments(launch, roles), "|", *sorted(_format_options(launch, names=True)))
        lines.append(f"  {launch.kernel.fn.__name__}[{grid}] {' '.join(words)}")
    return "\n".join(lines)


def compute_short_hash(data: bytes) -> str:
    """A hash prefix long enough to distinguish some thousand texts."""
    return hashlib.sha256(data).hexdigest()[:16]


def _hash_lines(lines: list[str]) -> str:
    return compute_short_hash("\n".join(lines).encode())


def _iterate_with_roles(planned: PlannedCase) -> Iterator[tuple[Launch, dict[Workspace, str]]]:
    """Each launch with the roles of workspaces, in the order of their use."""
    roles: dict[Workspace, str] = {}
    for launch in planned.launches or ():
        for array in _arrays(launch.arguments):
            if isinstance(array.memory, Workspace):
                roles.setdefault(array.memory, f"workspace{len(roles) + 1}")
        yield launch, roles


def _arrays(arguments: tuple[Any, ...]) -> Iterator[Array]:
    for value in arguments:
        if isinstance(value, tuple):
            yield from _arrays(value)
        elif isinstance(value, Array):
            yield value


def _format_arguments(launch: Launch, roles: dict[Workspace, str]) -> Iterator[str]:
    return (_format_argument(value, roles) for value in launch.arguments)


def _format_argument(value: Any, roles: dict[Workspace, str]) -> str:
    """A scalar unchanged; an array as role, dtype and shape, with strides and start if they are unusual."""
    if isinstance(value, tuple):
        return f"({' '.join(_format_argument(inner, roles) for inner in value)})"
    if not isinstance(value, Array):
        return repr(value)
    role = value.memory if isinstance(value.memory, str) else roles[value.memory]
    shape = ",".join(map(str, value.shape))
    strides = "" if value.is_dense else f"/{','.join(map(str, value.strides))}"
    start = f"+{value.offset}" if value.offset else ""
    return f"{role}{start}:{_DTYPES[value.dtype]}[{shape}]{strides}"


def _format_options(launch: Launch, names: bool) -> Iterator[str]:
    """Constexprs in the order of the parameters, with their `names` or without, then the compiler's options."""
    parameters = launch.kernel.arg_names
    for parameter in parameters[len(launch.arguments) :]:
        value = repr(launch.options[parameter])
        yield f"{parameter}={value}" if names else value
    yield from (f"{name}={value!r}" for name, value in sorted(launch.options.items()) if name not in parameters)
