import sys
from types import ModuleType

import pytest
import torch

from benchmarks import providers
from benchmarks.providers import PROVIDERS, available


def test_what_cannot_be_imported_is_left_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "quack", None)
    assert list(available(PROVIDERS)) == ["fusednorm", "torch", "compile", "tutorial"]
    assert "liger is left out" in capsys.readouterr().err


def test_a_package_that_fails_in_its_own_way_is_left_out(monkeypatch, tmp_path, capsys):
    (tmp_path / "quack.py").write_text("raise OSError('libcute.so is missing')")
    monkeypatch.delitem(sys.modules, "quack", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert not available(["quack"])
    assert "libcute.so is missing" in capsys.readouterr().err


def test_what_can_be_imported_takes_part(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    assert list(available(["quack", "torch"])) == ["quack", "torch"]


@pytest.mark.parametrize(
    ("op", "pass_", "variant"),
    [
        ("layer_norm", "forward", "silu"),
        ("layer_norm", "backward", "dropout"),
        ("layer_norm", "forward", "float8"),
        ("layer_norm", "forward", "chain"),
        ("rms_norm", "backward", "residual_float32"),
        ("group_norm", "forward", "silu"),
    ],
)
@pytest.mark.parametrize("provider", ["liger", "quack", "tutorial"])
def test_peers_decline_what_they_do_not_have(problem, provider, op, pass_, variant):
    shape, groups = ((2, 8, 4, 4), 4) if op == "group_norm" else ((6, 256), 0)
    assert PROVIDERS[provider](problem(op, pass_, variant, shape=shape, groups=groups)) is None


def test_the_backward_pass_of_torch_can_be_repeated(problem):
    run = providers.eager(problem(pass_="backward"))
    first, again = run.call(), run.call()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_heads_with_parameters_of_their_own_are_quack_s_in_rms_norm_alone(problem, monkeypatch):
    quack = ModuleType("quack.rmsnorm")
    quack.rmsnorm_fwd, quack.rmsnorm_bwd = (lambda x, *_, **__: (x, x, x)), (lambda x, *_: (x, x, None, None))
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", quack)
    for pass_, count in (("forward", 1), ("backward", 2)):
        heads = {"pass_": pass_, "variant": "per_head", "shape": (6, 3, 64), "layout": "heads"}
        assert len(PROVIDERS["quack"](problem("rms_norm", **heads)).call()) == count
        assert PROVIDERS["quack"](problem("layer_norm", **heads)) is None
        assert PROVIDERS["liger"](problem("rms_norm", **heads)) is None


def test_the_copy_is_of_x(problem):
    it = problem()
    (copied,) = providers.copy(it).call()
    assert torch.equal(copied, it.x)
    assert copied.data_ptr() != it.x.data_ptr()
