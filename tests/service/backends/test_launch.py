"""GroupNorm as it is called in both libraries: the CPU's, and the kernels, interpreted where there is no GPU."""

import fusednorm
import pytest
import torch
from fusednorm import reference
from normserve.backends import cpu
from normserve.backends.launch import launch
from normserve.backends.tensors import channels_first
from normserve.jobs.job import Layout, NormSpec, Op, Pass

GROUPS = 2
KERNELS_RUN_ON = "cuda" if torch.cuda.is_available() else "cpu"
LIBRARIES = {"cpu": (cpu, "cpu"), "kernels": (fusednorm, KERNELS_RUN_ON)}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def group_spec(direction: Pass, layout: Layout, **more: object) -> NormSpec:
    return NormSpec(Op.GROUP_NORM, direction, eps=1e-5, num_groups=GROUPS, layout=layout, **more)


def arrived(spec: NormSpec, samples: int = 2) -> dict[str, torch.Tensor]:
    """A request's tensors as a backend hands them on."""
    shape = (samples, 3, 5, 8) if spec.layout is Layout.NHWC else (samples, 8, 3, 5)
    names = ("x", "residual") if spec.direction is Pass.FORWARD else ("x", "residual", "dy", "dresidual_out")
    tensors = {name: torch.randn(shape).half() for name in names}
    tensors |= {"weight": torch.randn(8), "bias": torch.randn(8)}
    tensors |= {"scale": torch.randn(samples, 8).half(), "shift": torch.randn(samples, 8)}
    return {name: channels_first(spec, name, tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("direction", Pass)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_group_norm_with_everything(library, direction, layout, activation):
    functions, device = LIBRARIES[library]
    spec = group_spec(direction, layout, activation=activation, stats=direction is Pass.FORWARD)
    tensors = arrived(spec)
    got = launch(functions, spec, {name: tensor.to(device) for name, tensor in tensors.items()})
    leading = [tensors.pop(name) for name in ("dy", "x") if name in tensors]
    options = tensors | {"activation": activation, "precision": torch.float64}
    if direction is Pass.FORWARD:
        options["stats"] = True
    result = getattr(reference, f"group_norm_{direction.value}")(*leading, GROUPS, **options)
    want = {name: tensor for name, tensor in result._asdict().items() if tensor is not None}
    want.pop("dresidual", None)
    assert got.keys() == want.keys()
    for name, right in want.items():
        assert got[name].dtype == (torch.float32 if name in ("mean", "rstd") else right.dtype), name
        tolerance = 3e-5 if got[name].dtype == torch.float32 else 2e-3
        scale = right.double().abs().max().clamp(min=1)
        assert (got[name].cpu().double() - right.double()).abs().max() / scale <= tolerance, name


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("given", [("scale",), ("shift",)])
def test_scale_or_shift_alone(given, library, layout):
    functions, device = LIBRARIES[library]
    for direction in Pass:
        spec = group_spec(direction, layout)
        tensors = {name: t.to(device) for name, t in arrived(spec).items() if name in ("x", "dy", *given)}
        outputs = launch(functions, spec, tensors)
        assert outputs.keys() == ({"y"} if direction is Pass.FORWARD else {"dx", f"d{given[0]}"})


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_samples(library, layout):
    functions, device = LIBRARIES[library]
    spec = group_spec(Pass.BACKWARD, layout)
    tensors = {name: tensor.to(device) for name, tensor in arrived(spec, samples=0).items()}
    outputs = launch(functions, spec, tensors)
    for name in ("x", "weight", "bias", "scale", "shift"):
        assert outputs[f"d{name}"].shape == tensors[name].shape
        assert outputs[f"d{name}"].dtype == tensors[name].dtype
        assert not outputs[f"d{name}"].any()
