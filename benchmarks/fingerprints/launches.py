"""Launches as text, and as a hash for each kernel."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from fusednorm.launch.launch import Launch
from torch import Tensor

from benchmarks.fingerprints.cases import SHORT_NAMES, Planned, storage_of

_DTYPES = {**SHORT_NAMES, torch.float8_e4m3fn: "f8", torch.int64: "i64"}

REFUSED = "refused"
"""Used for a call that has no launches."""


def summaries(plans: Iterable[Planned]) -> dict[str, str]:
    """For each kernel, the number of its launches and a hash of their cases, grids, arguments and options."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for planned in plans:
        for place, (launch, roles) in enumerate(_with_roles(planned)):
            words = (*_arguments(launch, roles), *_options(launch, names=False))
            text = f"{planned.case.name} #{place} {launch.grid} {' '.join(words)}"
            texts[launch.kernel.fn.__name__].append(text)
    return {kernel: f"{len(each)} launches {_hash_lines(each)}" for kernel, each in texts.items()}


def full_text(planned: Planned) -> str:
    """The case and a line for each of its launches, with the names of kernels and parameters."""
    lines = [planned.case.name if planned.launches is not None else f"{planned.case.name}: {REFUSED}"]
    for launch, roles in _with_roles(planned):
        grid = ",".join(map(str, launch.grid))
        words = (*_arguments(launch, roles), "|", *sorted(_options(launch, names=True)))
        lines.append(f"  {launch.kernel.fn.__name__}[{grid}] {' '.join(words)}")
    return "\n".join(lines)


def short_hash(data: bytes) -> str:
    """A hash prefix long enough to distinguish some thousand texts."""
    return hashlib.sha256(data).hexdigest()[:16]


def _hash_lines(lines: list[str]) -> str:
    return short_hash("\n".join(lines).encode())


def _with_roles(planned: Planned) -> Iterator[tuple[Launch, dict[int, str]]]:
    """Each launch with the roles of storages: the call's tensors, and workspaces in the order of their use."""
    roles = dict(planned.tensors.roles)
    workspaces = 0
    for launch in planned.launches or ():
        for tensor in _tensors(launch.arguments):
            if storage_of(tensor) not in roles:
                workspaces += 1
                roles[storage_of(tensor)] = f"workspace{workspaces}"
        yield launch, roles


def _tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in arguments:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


def _arguments(launch: Launch, roles: dict[int, str]) -> Iterator[str]:
    return (_argument(value, roles) for value in launch.arguments)


def _argument(value: Any, roles: dict[int, str]) -> str:
    """A scalar unchanged; a tensor as role, dtype and shape, with strides and start if they are unusual."""
    if isinstance(value, tuple):
        return f"({' '.join(_argument(inner, roles) for inner in value)})"
    if not isinstance(value, Tensor):
        return repr(value)
    shape = ",".join(map(str, value.shape))
    strides = "" if value.is_contiguous() else f"/{','.join(map(str, value.stride()))}"
    start = f"+{value.storage_offset()}" if value.storage_offset() else ""
    return f"{roles[storage_of(value)]}{start}:{_DTYPES[value.dtype]}[{shape}]{strides}"


def _options(launch: Launch, names: bool) -> Iterator[str]:
    """Constexprs in the order of the parameters, with their `names` or without, then the compiler's options."""
    parameters = launch.kernel.arg_names
    for parameter in parameters[len(launch.arguments) :]:
        value = repr(launch.options[parameter])
        yield f"{parameter}={value}" if names else value
    yield from (f"{name}={value!r}" for name, value in sorted(launch.options.items()) if name not in parameters)
