"""`fusednorm.jax` is imported without torch, and says what is missing."""

import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import fusednorm.jax
import pytest

WITHOUT = """
import sys
sys.modules[{missing!r}] = None
import fusednorm.jax
{then}
"""

ON_CPU = """
import jax.numpy as jnp
fusednorm.jax.layer_norm(jnp.ones((2, 8)))
assert "triton" not in {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}
"""

ON_GPU = """
import jax, jax.numpy as jnp
jax.jit(fusednorm.jax.layer_norm).trace(jnp.ones((2, 8))).lower(lowering_platforms=("cuda",))
"""


def run(missing, then=""):
    command = [sys.executable, "-c", WITHOUT.format(missing=missing, then=then)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_torch_is_not_needed():
    done = run("torch", "import jax.numpy as jnp; fusednorm.jax.rms_norm(jnp.ones((2, 8)))")
    assert done.returncode == 0, done.stderr


def test_a_cpu_needs_no_triton():
    done = run("triton", ON_CPU)
    assert done.returncode == 0, done.stderr


def test_a_gpu_without_triton_says_what_to_install():
    done = run("triton", ON_GPU)
    assert done.returncode
    assert "layer_norm on a GPU runs Triton kernels, and Triton is not installed" in done.stderr


@pytest.mark.parametrize("name", [name for name in fusednorm.jax.__all__ if name.endswith("_norm")])
def test_arguments_have_the_defaults_of_the_functions_for_torch(name):
    """Those are not imported where torch is not installed, so their defaults stand here."""
    defaults = {
        "eps": 1e-6 if "rms" in name else 1e-5,
        "activation": "none",
        "negative_slope": 0.01,
        "dropout": 0.0,
        "weight_offset": 0.0,
        "layout": "nchw" if "group" in name else None,
    }
    for parameter in inspect.signature(getattr(fusednorm.jax, name)).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            assert parameter.default == defaults.get(parameter.name)


def test_examples_of_docstrings_show_what_they_print():
    failed, tried = doctest.testmod(fusednorm.jax)
    assert tried > 10
    assert not failed


def test_examples_of_the_page_run():
    page = Path(__file__).parents[2] / "docs/jax.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, page, "exec"), {})
