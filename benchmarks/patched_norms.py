"""Which norm classes of transformers, timm and diffusers `fusednorm.patch` replaces, and why not the others.

    python -m benchmarks.patched_norms --out benchmarks/results/patched_norms.csv

A norm class is a subclass of nn.Module with "norm" in its name, without convolutions, embeddings, batch statistics
and dropout inside.  Each is constructed with a few channels, called, patched and called again; a class counts as
patched if the second call is computed by this library, and its result and gradients are those of the first.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import logging
import pkgutil
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product
from typing import Any, NamedTuple

import fusednorm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.csv_results import CsvResults, add_output_options

PACKAGES = {
    "transformers": ("transformers.models",),
    "timm": ("timm.layers", "timm.models"),
    "diffusers": ("diffusers.models", "diffusers.pipelines"),
}
"""The packages of each library whose modules are searched."""

COLUMNS = ("library", "version", "module", "class", "outcome", "detail")

_WIDTH, _GROUPS, _SAMPLES = 32, 4, 2
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-6}
"""Fractions of the largest value."""

_SHAPES = (("tokens", "size"), ("size", 4, 4), ("size", 3, 4, 4), ("size", 6))
"""The shapes of a sample that are tried; the size is the shape of the norm's parameters."""

_ARGUMENTS = {
    **dict.fromkeys(("num_groups", "groups"), _GROUPS),
    **dict.fromkeys(("eps", "norm_eps"), 1e-6),
    **dict.fromkeys(("elementwise_affine", "norm_elementwise_affine", "bias", "affine"), True),
    "norm_type": "layer_norm",
}
"""The arguments of constructors that are not the number of channels, by their names."""

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_LEFT_OUT = ("device", "dtype", "process_group", "num_embeddings")
_LIKE_X = ("gate", "encoder_hidden_states", "context", "key_states")
_OF_BLOCKS = (nn.modules.conv._ConvNd, nn.Embedding, nn.modules.batchnorm._BatchNorm, nn.Dropout)


class PatchOutcome(NamedTuple):
    """What `patch` made of a class.

    Attributes:
        outcome: patched; inside, if only norms that the module contains are patched; skipped; untried, if the class
            could not be constructed or called; differs, if results or gradients are not the same.
        detail: the operation, or the reason.
    """

    outcome: str
    detail: str


class NotTriedError(Exception):
    """A class cannot be constructed or called with guessed arguments; the message says why."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output_options(parser)
    parser.add_argument("--only", nargs="+", choices=PACKAGES, default=list(PACKAGES), help="libraries to search")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results = CsvResults(arguments.out, COLUMNS, arguments.commit)
    with _silence():
        for library in arguments.only:
            for kind in find_norm_classes(library):
                found = try_class(kind)
                if found is not None:
                    row = {"library": library, "version": version(library)}
                    names = {"module": kind.__module__, "class": kind.__qualname__}
                    results.add_row(row | names | found._asdict())


def find_norm_classes(library: str) -> list[type[nn.Module]]:
    """Find the classes of a library that are named like norms, in the order of their names."""
    found: dict[tuple[str, str], type[nn.Module]] = {}
    for name in _iterate_module_names(library):
        # A module may need a package that is not installed.
        with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
            for kind in vars(importlib.import_module(name)).values():
                is_module = inspect.isclass(kind) and issubclass(kind, nn.Module)
                if is_module and _is_named_norm(kind) and kind.__module__.startswith(f"{library}."):
                    found[kind.__module__, kind.__qualname__] = kind
    return [found[key] for key in sorted(found)]


def try_class(kind: type[nn.Module]) -> PatchOutcome | None:
    """Construct, call, patch and call a class; None if it is a block around a norm, or a layer without one."""
    try:
        with torch.device("meta"):
            is_block = _is_block(_construct(kind))
        return None if is_block else _compare(_construct(kind))
    except NotTriedError as error:
        return PatchOutcome("untried", str(error))


def _compare(module: nn.Module) -> PatchOutcome | None:
    """Patch a module and compare its calls before and after; None if there is nothing to patch.

    Raises:
        NotTriedError: the module cannot be called.
    """
    inputs = _find_inputs(module)
    before = _call_and_differentiate(module, inputs)
    low_before = _call_in_bfloat16(module, inputs)
    report = fusednorm.patch(module)
    if not report.patched and not report.skipped:
        return None
    if not report.patched:
        return PatchOutcome("skipped", report.skipped[""].removeprefix(f"{type(module).__name__} "))
    with _OperatorNames() as seen:
        after = _call_and_differentiate(module, inputs)
    low_after = _call_in_bfloat16(module, inputs)
    if not _are_close(before, after, torch.float32) or not _are_close(low_before, low_after, torch.bfloat16):
        return PatchOutcome("differs", report.patched.get("", "a norm inside"))
    if "" not in report.patched:
        inner = sorted({operation.split(", as ")[0] for operation in report.patched.values()})
        return PatchOutcome("inside", ", ".join(inner))
    if not seen.has_library:
        return PatchOutcome("skipped", f"patched for calls with {next(iter(inputs))} alone")
    return PatchOutcome("patched", report.patched[""].split(", as ")[0])


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep warnings and log records of the libraries from the terminal."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


class _OperatorNames(TorchDispatchMode):
    """A mode that notices operators of this library."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_library = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.has_library |= function.namespace == "fusednorm"
        return function(*args, **(kwargs or {}))


def _iterate_module_names(library: str) -> Iterator[str]:
    for package in PACKAGES[library]:
        path = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(path, f"{package}.", onerror=lambda _: None):
            if library != "transformers" or ".modeling_" in module.name:
                yield module.name


def _is_named_norm(kind: type[nn.Module]) -> bool:
    """Return whether a class is named like a norm, apart from the name of the model to which it belongs."""
    model = kind.__module__.split(".")[-2].replace("_", "")
    return "norm" in kind.__name__.lower().removeprefix(model)


def _is_block(module: nn.Module) -> bool:
    """Return whether a module contains layers that no norm has."""
    return any(isinstance(each, _OF_BLOCKS) for each in module.modules())


def _construct(kind: type[nn.Module]) -> nn.Module:
    """Construct a class from the names of its parameters, and give the module's parameters random values.

    Raises:
        NotTriedError: that is not possible.
    """
    for parameters in (_list_parameters(kind), _list_parameters(kind, *_find_base(kind))):
        needed = [each for each in parameters if each.default is each.empty]
        optional = [each for each in parameters if each.default is None or each.name in _ARGUMENTS]
        for width, chosen in ((_WIDTH, needed), (_WIDTH, [*needed, *optional]), ((_GROUPS, _WIDTH), needed)):
            # A constructor may raise anything.
            with contextlib.suppress(Exception):
                return _randomise(kind(**{each.name: _guess_argument(each, width, kind) for each in chosen}))
    raise NotTriedError("its constructor needs other arguments")


def _randomise(module: nn.Module) -> nn.Module:
    """Give a module's parameters random values, so that each of them counts."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def _find_base(kind: type[nn.Module]) -> list[type[nn.Module]]:
    """Find the first base with a constructor, to which a class may pass other arguments than it names."""
    return [base for base in kind.__mro__[1:] if "__init__" in vars(base) and base is not nn.Module][:1]


def _list_parameters(*kinds: type[nn.Module]) -> list[inspect.Parameter]:
    """List the named parameters of the constructors of classes, those of the first class first."""
    found: dict[str, inspect.Parameter] = {}
    for kind in kinds:
        for each in list(inspect.signature(kind.__init__).parameters.values())[1:]:
            if each.kind not in _VARIABLE and each.name not in _LEFT_OUT:
                found.setdefault(each.name, each)
    return list(found.values())


def _guess_argument(parameter: inspect.Parameter, width: object, kind: type[nn.Module]) -> object:
    """Guess the value of a constructor's parameter from its name."""
    if parameter.name == "config":
        return _make_config(kind)
    return _ARGUMENTS.get(parameter.name, width)


def _make_config(kind: type[nn.Module]) -> object:
    """Make the configuration of the model of transformers to which a class belongs, with its default values."""
    package, _, name = kind.__module__.rpartition(".")
    module = importlib.import_module(f"{package}.{name.replace('modeling_', 'configuration_')}")
    configs = [
        each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__
    ]
    return configs[-1]()


def _find_inputs(module: nn.Module) -> dict[str, Tensor]:
    """Find arguments by name with which a module can be called; its x is the first of them.

    Raises:
        NotTriedError: none of the shapes that are tried is possible.
    """
    _, x_parameter, *others = inspect.signature(type(module).forward).parameters.values()
    others = [each for each in others if each.kind not in _VARIABLE]
    needed = [each for each in others if each.default is each.empty]
    found: list[dict[str, Tensor]] = []
    for shape in _SHAPES[hasattr(module, "num_groups") :]:
        x = torch.randn(_SAMPLES, *_fill_shape(shape, _find_size(module)))
        for chosen, condition in product((needed, others), ((_SAMPLES, _WIDTH), (_WIDTH,))):
            inputs = {x_parameter.name: x}
            for each in chosen:
                inputs[each.name] = torch.randn(x.shape if each.name in _LIKE_X else condition)
            # So may a forward.
            with contextlib.suppress(Exception):
                y, *_ = _call_and_differentiate(module, inputs)
                # A weight [C, 1, 1, 1] may add an axis to an x that is not meant.
                if y.shape == x.shape:
                    return inputs
                found.append(inputs)
    if not found:
        raise NotTriedError("its forward needs other arguments")
    return found[0]


def _fill_shape(shape: tuple[int | str, ...], size: tuple[int, ...]) -> list[int]:
    """Return a sample's shape with numbers for its words."""
    words = {"tokens": (3,), "size": size}
    return [number for each in shape for number in (words[each] if isinstance(each, str) else (each,))]


def _find_size(module: nn.Module) -> tuple[int, ...]:
    """Find the shape of the parameters with which a module normalises."""
    for parameter in module.parameters(recurse=False):
        return tuple(size for size in parameter.shape if size > 1)
    for each in module.modules():
        declared = getattr(each, "normalized_shape", None) or getattr(each, "num_channels", None)
        sizes = declared if isinstance(declared, tuple | list) else (declared,)
        if all(isinstance(size, int) and size > 0 for size in sizes):
            return tuple(sizes)
    return (_WIDTH,)


def _call_and_differentiate(module: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Call a module; return its results and the gradients of its inputs and parameters."""
    leaves = {name: each.clone().requires_grad_() for name, each in inputs.items()}
    results = _call(module, leaves)
    total = sum((each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in results)
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, [*leaves.values(), *module.parameters()], allow_unused=True)
    return [*results, *(each for each in gradients if each is not None)]


def _call_in_bfloat16(module: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Call a module in bfloat16 and return its results; nothing if it cannot be."""
    saved = {name: each.clone() for name, each in module.state_dict().items()}
    try:
        with torch.no_grad():
            return _call(module.bfloat16(), {name: each.bfloat16() for name, each in inputs.items()})
    except Exception:
        return []
    finally:
        module.float().load_state_dict(saved)


def _call(module: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Call a module, its x by place and all else by name, and return the tensors that it returns."""
    x, *others = inputs
    result = module(inputs[x], **{name: inputs[name] for name in others})
    return [each for each in (result if isinstance(result, tuple) else (result,)) if isinstance(each, Tensor)]


def _are_close(before: list[Tensor], after: list[Tensor], dtype: torch.dtype) -> bool:
    """Return whether two calls returned the same dtypes, and the same values up to rounding in `dtype`."""
    return len(before) == len(after) and all(
        one.dtype is other.dtype and (one - other).abs().max() <= _TOLERANCES[dtype] * one.abs().max()
        for one, other in zip(before, after, strict=True)
    )


if __name__ == "__main__":
    main()
