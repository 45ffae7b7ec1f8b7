"""Triton's interpreter as tests use it: it runs the kernels of a GPU, rounds as one does, and takes less time.

The interpreter runs no inline assembly, and reductions by functions of kernels number by number.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from triton.language import core, semantic
from triton.runtime import interpreter

from tests.cooperative_launch import CooperativeLaunch
from tests.inline_assembly import COMPUTED


def change(patch: pytest.MonkeyPatch) -> None:
    """Make all changes."""
    for each in (
        compute_assembly,
        run_programs_together,
        reduce_in_trees,
        round_float8,
        prepare_once,
        let_integers_overflow,
        remember_types,
        remember_operands,
        call_directly,
    ):
        each(patch)


def compute_assembly(patch: pytest.MonkeyPatch) -> None:
    """Inline assembly is computed by numpy, each statement by a function that is known to do the same."""

    def create_inline_asm(builder, statement, constraints, operands, types, is_pure, pack):
        if statement not in COMPUTED:
            raise NotImplementedError(
                f"no function computes this inline assembly, add one to tests/inline_assembly.py: {statement}"
            )
        results = COMPUTED[statement](*[operand.data for operand in operands])
        arrays = results if isinstance(results, tuple) else (results,)
        kinds = [type_.scalar for type_ in types]
        return _Results([interpreter.TensorHandle(*result) for result in zip(arrays, kinds, strict=True)])

    patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)


def run_programs_together(patch: pytest.MonkeyPatch) -> None:
    """Programs of a cooperative launch take turns where they wait for one another."""
    run = interpreter.InterpretedFunction.run

    class CooperativeExecutor(interpreter.GridExecutor):
        def __init__(self, function, names, grid, hooks):
            super().__init__(function, names, self._begin, hooks)
            self._programs = grid

        def _begin(self, _):
            # The interpreter asks for the grid when it has looked at the function, and calls that for each program.
            self.fn = CooperativeLaunch(self.fn, math.prod(self._programs)).add
            return self._programs

    def run_function(function, *args, grid, warmup, **options):
        if not options.get("launch_cooperative_grid"):
            return run(function, *args, grid=grid, warmup=warmup, **options)
        return CooperativeExecutor(function.rewrite(), function.arg_names, grid, function.pre_run_hooks)(
            *args, **options
        )

    patch.setattr(interpreter.InterpretedFunction, "run", run_function)


def reduce_in_trees(patch: pytest.MonkeyPatch) -> None:
    """Functions of kernels combine halves of a tensor, as on a GPU, in place of one number after another."""

    def generic_reduce(reduction, tensors):
        axis = core._unwrap_if_constexpr(reduction.axis)
        while (size := tensors[0].handle.data.shape[axis]) > 1:
            halves = [np.split(tensor.handle.data, [size // 2], axis) for tensor in tensors]
            operands = [
                reduction.to_tensor(half, tensor.dtype)
                for side in zip(*halves, strict=True)
                for half, tensor in zip(side, tensors, strict=True)
            ]
            combined = reduction.combine_fn(*operands)
            tensors = combined if len(tensors) > 1 else (combined,)
        if reduction.keep_dims:
            return tensors
        return [reduction.to_tensor(tensor.handle.data.squeeze(axis)[()], tensor.dtype) for tensor in tensors]

    patch.setattr(interpreter.ReduceOps, "generic_reduce", generic_reduce)


def round_float8(patch: pytest.MonkeyPatch) -> None:
    """To nearest even, saturating; the interpreter's own conversion loses carries and makes a number of NaN."""
    convert = interpreter._convert_float

    def convert_float(data, source, target, rounding):
        if not target.is_fp8e4nv():
            return convert(data, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(data)).clamp(-448, 448)
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    patch.setattr(interpreter, "_convert_float", convert_float)


def prepare_once(patch: pytest.MonkeyPatch) -> None:
    """Triton's language is prepared at every launch and undone after it, and again for each device function."""
    prepare = interpreter._patch_lang
    scope = _LastingScope(patch)
    patch.setattr(interpreter, "_LangPatchScope", lambda: scope)
    prepared = set()

    def prepare_module(function):
        # Each module may know the language, or parts of it, by another name.
        if function.__module__ not in prepared:
            prepared.add(function.__module__)
            prepare(function)
        return scope

    def call(function, *args, **kwargs):
        prepare_module(function.fn)
        return function.rewrite()(*args, **kwargs)

    patch.setattr(interpreter, "_patch_lang", prepare_module)
    patch.setattr(interpreter.InterpretedFunction, "__call__", call)


def let_integers_overflow(patch: pytest.MonkeyPatch) -> None:
    """Whether they do is seen by computing everything a second time; where they do, results are wrong."""
    builder = interpreter.interpreter_builder
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def remember_types(patch: pytest.MonkeyPatch) -> None:
    """What follows from a type is worked out anew for every tensor, which is most of what an operation takes."""
    patch.setattr(interpreter, "_get_np_dtype", _remembering(interpreter._get_np_dtype))
    patch.setattr(core.block_type, "__init__", _remembering_blocks(core.block_type.__init__))
    patch.setattr(core.tensor, "__init__", _remembering_tensors(core.tensor.__init__))
    patch.setattr(
        semantic.TritonSemantic,
        "broadcast_impl_value",
        _unless_alike(semantic.TritonSemantic.broadcast_impl_value),
    )


def remember_operands(patch: pytest.MonkeyPatch) -> None:
    """Operands of one type need no conversion, and a number becomes the same constant beside all of one type."""
    check = semantic.TritonSemantic.binary_op_type_checking_impl
    patch.setattr(semantic.TritonSemantic, "binary_op_type_checking_impl", _converting_once(check))


def call_directly(patch: pytest.MonkeyPatch) -> None:
    """Every function of the language is found and called through two others; every handle is checked."""
    patch.setattr(interpreter, "_patch_attr", _patch_attr)
    patch.setattr(core, "_unwrap_if_constexpr", _unwrapping(core._unwrap_if_constexpr))
    patch.setattr(interpreter.TensorHandle, "__post_init__", lambda _: None)


# Types that arithmetic leaves as they are.
_ARITHMETIC = {"fp32", "fp64", "int1", "int32", "int64"}
_NUMBERS = {bool, float, int}
_INDICES = {"int32", "int64"}
# What is no constant of a kernel's, and holds none.
_NO_CONSTANTS = {core.tensor, core.dtype, bool, float, int, str, type(None)}
_BUILTIN = core.builtin(lambda: None).__code__


def _converting_once(check: Callable[..., Any]) -> Callable[..., Any]:
    constants: dict[tuple[Any, ...], Any] = {}

    def checked(language, left, right, *flags, **named):
        if named:
            # Operands of inline assembly, whose types stay as they are.
            return check(language, left, right, *flags, **named)
        one, other = type(left), type(right)
        if one is other is core.tensor:
            name, another = left.type.scalar.name, right.type.scalar.name
            if name == another and name in _ARITHMETIC:
                return language.broadcast_impl_value(left, right)
            if name == "int64" and another == "int32":
                return language.broadcast_impl_value(left, _widened(right))
            if name == "int32" and another == "int64":
                return language.broadcast_impl_value(_widened(left), right)
            # An offset from a pointer.
            if flags == (True, True) and another in _INDICES and left.type.scalar.is_ptr():
                return language.broadcast_impl_value(left, right)
        elif one is core.tensor and other in _NUMBERS:
            # Not by the value alone: 1 and 1.0 are equal, and so are 0.0 and -0.0.
            key = (repr(right), left.type.name, flags, False)
            if key in constants:
                return left, constants[key]
            before, (left, constant) = left, check(language, left, right, *flags)
            if left is before:
                constants[key] = constant
            return left, constant
        elif other is core.tensor and one in _NUMBERS:
            key = (repr(left), right.type.name, flags, True)
            if key in constants:
                return constants[key], right
            before, (constant, right) = right, check(language, left, right, *flags)
            if right is before:
                constants[key] = constant
            return constant, right
        return check(language, left, right, *flags)

    return checked


class _LastingScope:
    """Changes of Triton's language that stay as long as those of the interpreter."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def set_attr(self, target: object, name: str, value: object) -> None:
        self._patch.setattr(target, name, value, raising=False)

    def restore(self) -> None:
        """Keep them."""


class _Results(NamedTuple):
    """What inline assembly computes, as the language asks for it."""

    handles: list[interpreter.TensorHandle]

    def get_result(self, place):
        return self.handles[place]


def _widened(tensor):
    type_ = tensor.type
    handle = interpreter.TensorHandle(tensor.handle.data.astype(np.int64), core.int64)
    return core.tensor(handle, type_.with_element_ty(core.int64) if type_.is_block() else core.int64)


def _patch_attr(target, name, member, builder, scope):
    function = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN else member
    language = interpreter.interpreter_semantic

    def call(*args, **kwargs):
        kwargs["_semantic"] = language
        return function(*args, **kwargs)

    scope.set_attr(target, name, call)


def _unwrapping(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def unwrapped(value):
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in _NO_CONSTANTS else unwrap(value)

    return unwrapped


def _remembering(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def converted(type_):
        name = type_.name
        if name not in known:
            known[name] = convert(type_)
        return known[name]

    return converted


def _remembering_blocks(initialise: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def initialise_block(block, element_ty, shape):
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in known:
            initialise(block, element_ty, shape)
            known[key] = dict(vars(block))
        vars(block).update(known[key])

    return initialise_block


def _remembering_tensors(initialise: Callable[..., None]) -> Callable[..., None]:
    known: dict[str, dict[str, Any]] = {}

    def initialise_tensor(tensor, handle, type):
        name = type.name
        if name not in known:
            initialise(tensor, handle, type)
            known[name] = {field: value for field, value in vars(tensor).items() if field != "handle"}
        vars(tensor).update(known[name], handle=handle)

    return initialise_tensor


def _unless_alike(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_unless_alike(language, left, right):
        one, other = left.type, right.type
        if one.is_block():
            if not other.is_block():
                return left, _filling(one, right)
            if one.shape.values == other.shape.values:
                return left, right
        elif other.is_block():
            return _filling(other, left), right
        else:
            return left, right
        return broadcast(language, left, right)

    return broadcast_unless_alike


def _filling(block, scalar):
    """A block of this one's shape that has the scalar everywhere."""
    values = scalar.handle.data
    data = np.empty([getattr(size, "value", size) for size in block.shape], values.dtype)
    data.fill(values[0])
    return core.tensor(
        interpreter.TensorHandle(data, scalar.type.scalar), block.with_element_ty(scalar.type.scalar)
    )
