"""Which modules of a model are patched, what is told of them, and that everything can be taken back."""

import copy
import inspect
import pickle
import re
import weakref
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path

import fusednorm
import pytest
import torch
from fusednorm.errors import KernelInputError
from fusednorm.launch.call_status import describe_repeated_calls
from torch import nn

from tests.garbage_collector import without_collector
from tests.kernels.api.norm_calls import Dispatched
from tests.kernels.api.patching.norms import (
    GemmaRMSNorm,
    InheritingLayerNorm,
    LlamaRMSNorm,
    Mixed,
    add_hook,
    remove_hook,
    varied,
)


@pytest.fixture
def x(device):
    return torch.randn(2, 4, 8, device=device)


def operators(model, *inputs):
    """The library's operators that a call of the model dispatches, by their short names."""
    with Dispatched() as seen:
        model(*inputs)
    return [name.removeprefix("fusednorm::") for name in seen.names]


def attributes(model):
    return [dict(vars(module)) for module in model.modules()]


def test_every_norm_goes_to_the_kernels_and_nothing_else_changes(device, x):
    model = Mixed().to(device)
    want, names = model(x), list(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    report = fusednorm.patch(model)
    assert dict(report.patched) == {
        "first": "layer_norm",
        "llama": "rms_norm, as LlamaRMSNorm has it",
        "gemma": "rms_norm, weight_offset=1, as GemmaRMSNorm has it",
        "rms": "rms_norm",
        "tied": "layer_norm",
        "net.0": "group_norm",
        "net.3": "group_norm",
        "net": "group_norm with silu in a Sequential",
    }
    assert not report.skipped
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)
    assert operators(model, x) == [
        "layer_norm",
        "rms_norm",
        "rms_norm",
        "rms_norm",
        "layer_norm",
        "layer_norm",
        "group_norm",
        "group_norm",
    ]
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == kinds
    assert repr(model) == repr(Mixed())


def test_gradients_are_those_of_the_model(device, x):
    model = Mixed().to(device)
    patched = copy.deepcopy(model)
    fusednorm.patch(patched)
    for each in (model, patched):
        each(x).square().sum().backward()
    for (name, want), got in zip(model.named_parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_unpatching_leaves_nothing_behind(device, x):
    model = Mixed().to(device)
    want, before = model(x), attributes(model)
    fusednorm.patch(model)
    assert attributes(model) != before
    fusednorm.unpatch(model)
    assert attributes(model) == before
    assert torch.equal(model(x), want)
    assert not operators(model, x)
    fusednorm.unpatch(model)


def test_a_second_patch_changes_nothing(x, device):
    model = Mixed().to(device)
    first = fusednorm.patch(model)
    before = attributes(model)
    second = fusednorm.patch(model)
    assert second.patched == {}
    assert second.skipped == dict.fromkeys(first.patched, "patched already")
    assert attributes(model) == before
    fusednorm.unpatch(model)
    assert not operators(model, x)


def has_norms_of_class(model, x):
    """Whether a call uses none of the library's operators, and `patch` would find the model as it was."""
    return (
        not operators(model, x) and "patched already" not in fusednorm.patch(copy.deepcopy(model)).skipped.values()
    )


@pytest.mark.parametrize("kind", [nn.LayerNorm, LlamaRMSNorm])
def test_unpatching_reaches_below_a_hook_of_accelerate(kind, device, x):
    norm = varied(kind(8)).to(device)
    want = norm(x)
    fusednorm.patch(norm)
    add_hook(norm)
    assert operators(norm, x)
    fusednorm.unpatch(norm)
    assert has_norms_of_class(norm, x)
    remove_hook(norm)
    assert has_norms_of_class(norm, x)
    assert torch.equal(norm(x), want)
    fusednorm.unpatch(norm)


@pytest.mark.parametrize("kind", [nn.LayerNorm, LlamaRMSNorm, partial(nn.GroupNorm, 2)])
def test_a_model_with_hooks_of_accelerate_is_patched(kind, device):
    model, x = nn.Sequential(varied(kind(4)), nn.Linear(4, 4)).to(device), torch.randn(2, 4, 4, device=device)
    for module in model.modules():
        add_hook(module, shift=1.0)
    want, before = model(x), attributes(model)
    assert set(fusednorm.patch(model).patched) == {"0"}
    assert len(operators(model, x)) == 1
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)
    assert set(fusednorm.patch(model).skipped.values()) == {"patched already"}
    fusednorm.unpatch(model)
    assert attributes(model) == before
    fusednorm.patch(model)
    for module in model.modules():
        remove_hook(module)
    assert len(operators(model, x)) == 1
    fusednorm.unpatch(model)
    assert has_norms_of_class(model, x)


def test_a_model_whose_hooks_were_removed_is_patched(device, x):
    model = nn.Sequential(nn.LayerNorm(8), LlamaRMSNorm(8), nn.GroupNorm(2, 4), nn.SiLU()).to(device)
    for module in model.modules():
        add_hook(module)
        remove_hook(module)
    assert set(fusednorm.patch(model).patched) == {"", "0", "1", "2"}
    assert len(operators(model, x)) == 3


def test_unpatching_names_what_other_code_has_wrapped(device, x):
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)).to(device)
    fusednorm.patch(model)
    patched = model[1].forward
    model[1].forward = wraps(patched)(lambda x: patched(x))
    with pytest.raises(KernelInputError, match=r"got wrapped ones in 1: remove the wrappers"):
        fusednorm.unpatch(model)
    assert len(operators(model, x)) == 1
    model[1].forward = patched
    fusednorm.unpatch(model)
    assert has_norms_of_class(model, x)


def test_only_some_may_be_patched(device, x):
    model = Mixed().to(device)
    report = fusednorm.patch(model, only=lambda path, module: path == "gemma" or isinstance(module, nn.LayerNorm))
    assert set(report.patched) == {"first", "gemma", "tied"}
    assert report.skipped == dict.fromkeys(["llama", "rms", "net.0", "net.3"], "left out by `only`")
    assert operators(model, x) == ["layer_norm", "rms_norm", "layer_norm", "layer_norm"]


@pytest.mark.parametrize("only", ["net.0", ["net.0"], True])
def test_modules_are_selected_by_a_function(only, device):
    model = nn.Sequential(nn.LayerNorm(8)).to(device)
    with pytest.raises(KernelInputError, match=r"only must be a function .*: write only=lambda path, module: "):
        fusednorm.patch(model, only)
    assert "forward" not in vars(model[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_torchscript_has_compiled_is_left_alone(device, x):
    compiled = torch.jit.script(nn.Sequential(nn.LayerNorm(8), nn.SiLU()))
    traced = torch.jit.trace(nn.RMSNorm(8), torch.randn(2, 8))
    model = nn.Sequential(compiled, nn.LayerNorm(8), torch.jit.script(nn.SiLU()), traced).to(device)
    expected = model(x)
    report = fusednorm.patch(model)
    assert report.patched == {"1": "layer_norm"}
    assert report.skipped == dict.fromkeys(["0.0", "3"], "compiled by TorchScript, which keeps its forward")
    torch.testing.assert_close(model(x), expected)
    fusednorm.unpatch(model)
    assert not fusednorm.patch(compiled).patched


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_says_what_to_call_before_it_compiles_a_patched_model(device):
    model = nn.Sequential(nn.LayerNorm(8), nn.SiLU()).to(device)
    fusednorm.patch(model)
    with pytest.raises(AttributeError, match=r"call fusednorm.unpatch\(model\) first"):
        torch.jit.script(model)
    fusednorm.unpatch(model)
    torch.jit.script(model)


def test_a_norm_alone_is_a_model(device, x):
    norm = nn.LayerNorm(8, device=device)
    assert fusednorm.patch(norm).patched == {"": "layer_norm"}
    assert operators(norm, x) == ["layer_norm"]


def without_values(norm):
    return norm.to("meta")


def replaced(norm):
    norm.forward = partial(norm.forward)
    return norm


def with_weight(norm, weight):
    norm.weight = weight
    return norm


class Tagged(nn.Parameter):
    """A parameter of a kind of its own."""


def emptied(norm):
    norm.weight.untyped_storage().resize_(0)
    return norm


SKIPPED = {
    "no values": (without_values(nn.LayerNorm(8)), "its weight is on the meta device, without values"),
    "wide": (nn.GroupNorm(2, 4).double(), "its weight is float64"),
    "narrow": (LlamaRMSNorm(8).to(torch.float8_e4m3fn), "its weight is float8_e4m3fn"),
    "no axis": (nn.LayerNorm(()), "no kernel takes normalized_shape []"),
    "no element": (nn.RMSNorm((4, 0)), "no kernel takes normalized_shape [4, 0]"),
    "negative eps": (nn.LayerNorm(8, eps=-1.0), "eps must be at least 0 and finite, got -1.0"),
    "ours": (fusednorm.GroupNorm(2, 4), "on these kernels already"),
    "replaced": (replaced(nn.LayerNorm(8)), "its forward is replaced by another"),
    "subclass": (with_weight(nn.LayerNorm(8), Tagged(torch.ones(8))), "its weight is a Tagged"),
    "flat": (
        with_weight(nn.LayerNorm(8), nn.Parameter(torch.ones(0))),
        "its weight is sharded: [0] of [8] are here",
    ),
    "part": (
        with_weight(GemmaRMSNorm(8), nn.Parameter(torch.ones(0))),
        "its weight is sharded: [0] of [0] are here",
    ),
    "freed": (emptied(nn.RMSNorm(8)), "its weight is sharded: [8] of [8] are here"),
    "batch": (nn.BatchNorm1d(8), "no kernel for BatchNorm1d"),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_left_alone_with_a_reason(case):
    norm, reason = SKIPPED[case]
    model = nn.Sequential(norm, nn.Linear(8, 8))
    before = attributes(model)
    report = fusednorm.patch(model)
    assert (report.patched, report.skipped) == ({}, {"0": reason})
    assert attributes(model) == before


def test_a_distributed_parameter_is_left_alone(tmp_path):
    # More than a second of imports, which every process that collects tests would take.
    from torch.distributed.tensor import distribute_module, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        norm = nn.LayerNorm(8)
        norm.weight = nn.Parameter(distribute_tensor(norm.weight.data, mesh))
        assert fusednorm.patch(norm).skipped == {"": "its weight is a DTensor"}
        # One that becomes such afterwards is computed as before.
        norm, x = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8, bias=False)), torch.randn(4, 8)
        want = norm(x)
        fusednorm.patch(norm)
        distribute_module(norm, mesh)
        torch.testing.assert_close(norm(distribute_tensor(x, mesh)).to_local(), want)
    finally:
        torch.distributed.destroy_process_group()


def test_a_class_that_inherits_the_forward_is_patched(device, x):
    norm = InheritingLayerNorm(8, device=device)
    assert fusednorm.patch(norm).patched == {"": "layer_norm"}
    assert isinstance(norm, InheritingLayerNorm)
    torch.testing.assert_close(norm(x), nn.LayerNorm(8, device=device)(x))


def test_a_model_is_freed_without_the_garbage_collector(device):
    model = Mixed().to(device)
    fusednorm.patch(model)
    alive = weakref.ref(model.first.weight)
    with without_collector():
        del model
        assert alive() is None


def test_a_forward_without_its_module_says_so(x):
    norm = nn.LayerNorm(8)
    fusednorm.patch(norm)
    shallow = copy.copy(norm)
    torch.testing.assert_close(shallow(x.cpu()), norm(x.cpu()))
    del norm
    with pytest.raises(ReferenceError, match=r"copy patched modules by copy\.deepcopy"):
        shallow(x.cpu())


def test_what_a_forward_takes_is_still_told(device, x):
    norm = varied(LlamaRMSNorm(8)).to(device)
    signature = inspect.signature(norm.forward)
    fusednorm.patch(norm)
    assert inspect.signature(norm.forward) == signature
    torch.testing.assert_close(norm(hidden_states=x), norm(x))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        norm(x=x)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        norm()


def test_the_report_is_for_people():
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(nn.LayerNorm(8) for _ in range(5)),
            "head": nn.Sequential(nn.GroupNorm(2, 4), nn.GELU("tanh")),
            "stem": nn.BatchNorm2d(4),
        }
    )
    assert str(fusednorm.patch(model)) == (
        "patched 7, skipped 1\n"
        "patched    5  layer_norm: layers.0, layers.1, layers.2 and 2 more\n"
        "patched    1  group_norm: head.0\n"
        "patched    1  group_norm with gelu_tanh in a Sequential: head\n"
        "skipped    1  no kernel for BatchNorm2d: stem\n"
        "on the CPU: 7 of the patched; torch computes them there, and nothing is gained"
    )
    assert str(fusednorm.patch(nn.Linear(2, 2))) == "patched 0, skipped 0"


def test_the_report_says_how_calls_on_a_gpu_are_made():
    report = fusednorm.patch(nn.LayerNorm(8))
    assert report.calls == describe_repeated_calls()
    assert report.calls not in str(report)
    assert str(replace(report, on_cpu=0)).splitlines()[-1] == report.calls
    assert str(replace(fusednorm.patch(nn.Linear(2, 2)), on_cpu=0)) == "patched 0, skipped 0"


def test_a_report_taken_for_the_model_says_so():
    report = fusednorm.patch(nn.LayerNorm(8))
    with pytest.raises(TypeError, match=r"is not callable: .* write `fusednorm\.patch\(model\)` instead of"):
        report(torch.ones(8))
    with pytest.raises(AttributeError, match=r"has no attribute 'parameters': .* changes the model in place"):
        report.parameters()
    assert copy.deepcopy(pickle.loads(pickle.dumps(report))) == report


@pytest.mark.parametrize("change", [fusednorm.patch, fusednorm.unpatch])
@pytest.mark.parametrize(
    ("model", "got"),
    [(None, "NoneType"), (nn.LayerNorm, "the class LayerNorm"), (fusednorm.patch(nn.Identity()), "PatchReport")],
)
def test_what_is_no_model_is_refused(change, model, got):
    with pytest.raises(KernelInputError, match=f"model must be an instance of nn.Module, got {got}$"):
        change(model)


def test_the_examples_of_the_documentation_are_true(capsys):
    text = (Path(__file__).parents[4] / "docs" / "patching.md").read_text()
    codes, (output,) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "text"))
    names = {}
    for code in codes:
        exec(code, names)
    assert capsys.readouterr().out == output
    y, norm2, x, scale, shift = (names[name] for name in ("y", "norm2", "x", "scale", "shift"))
    torch.testing.assert_close(y, norm2(x) * (1 + scale[:, None]) + shift[:, None])
