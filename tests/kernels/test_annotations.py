"""Beside Triton's kernels, whose language has no Python types, every function says what it takes and returns."""

import ast
from pathlib import Path

import fusednorm

PACKAGE = Path(fusednorm.__file__).parent


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def lacks_annotations(function: ast.FunctionDef) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
    return function.returns is None or any(argument.annotation is None for argument in named)


def test_all_but_kernels_is_annotated():
    lacking = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and not is_kernel(node) and lacks_annotations(node)
    ]
    assert not lacking
