"""Operations as both libraries are called: the CPU's, and the kernels, interpreted where there is no GPU."""

from itertools import product

import fusednorm
import pytest
import torch
from fusednorm import reference
from fusednorm.cpu import batch_invariant
from normserve.backends.library_calls import run_operation
from normserve.backends.tensor_conversion import DTYPES, move_channels_first
from normserve.codec.api_names import ACTIVATIONS
from normserve.jobs.job import ROW_OPS, ChannelLayout, NormSpec, Op, PassDirection
from normserve.jobs.result_specs import infer_result_specs
from normserve.memory.tensors import DType

from tests.sampling import mark_rest_slow
from tests.service.backends.answers import assert_right

pytestmark = pytest.mark.usefixtures("interpreter")

GROUPS = 2
KERNELS_RUN_ON = "cuda" if torch.cuda.is_available() else "cpu"
LIBRARIES = {"cpu": (batch_invariant, "cpu"), "kernels": (fusednorm, KERNELS_RUN_ON)}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def group_spec(direction: PassDirection, layout: ChannelLayout, **more: object) -> NormSpec:
    return NormSpec(Op.GROUP_NORM, direction, eps=1e-5, num_groups=GROUPS, layout=layout, **more)


def arrived(spec: NormSpec, samples: int = 2) -> dict[str, torch.Tensor]:
    """A request's tensors as a backend hands them on."""
    shape = (samples, 3, 5, 8) if spec.layout is ChannelLayout.NHWC else (samples, 8, 3, 5)
    names = (
        ("x", "residual") if spec.direction is PassDirection.FORWARD else ("x", "residual", "dy", "dresidual_out")
    )
    tensors = {name: torch.randn(shape).half() for name in names}
    tensors |= {"weight": torch.randn(8), "bias": torch.randn(8)}
    tensors |= {"scale": torch.randn(samples, 8).half(), "shift": torch.randn(samples, 8)}
    return {name: move_channels_first(spec, name, tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("library", "direction", "layout", "activation"),
    mark_rest_slow(product(LIBRARIES, PassDirection, ChannelLayout, ACTIVATIONS)),
)
def test_a_group_norm_with_everything(library, direction, layout, activation):
    functions, device = LIBRARIES[library]
    spec = group_spec(direction, layout, activation=activation, stats=direction is PassDirection.FORWARD)
    tensors = arrived(spec)
    got = run_operation(functions, spec, {name: tensor.to(device) for name, tensor in tensors.items()})
    leading = [tensors.pop(name) for name in ("dy", "x") if name in tensors]
    options = tensors | {"activation": activation, "precision": torch.float64}
    if direction is PassDirection.FORWARD:
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


@pytest.mark.parametrize("layout", ChannelLayout)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("given", [("scale",), ("shift",)])
def test_scale_or_shift_alone(given, library, layout):
    functions, device = LIBRARIES[library]
    for direction in PassDirection:
        spec = group_spec(direction, layout)
        tensors = {name: t.to(device) for name, t in arrived(spec).items() if name in ("x", "dy", *given)}
        outputs = run_operation(functions, spec, tensors)
        assert outputs.keys() == ({"y"} if direction is PassDirection.FORWARD else {"dx", f"d{given[0]}"})


@pytest.mark.parametrize("op", ROW_OPS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_samples_have_statistics_of_no_positions(library, op):
    functions, device = LIBRARIES[library]
    spec = NormSpec(op, PassDirection.FORWARD, eps=1e-5, layout=ChannelLayout.NCHW, stats=True)
    outputs = run_operation(functions, spec, {"x": torch.empty(0, 8, 3, 5, device=device)})
    assert outputs["y"].shape == (0, 8, 3, 5)
    assert outputs["rstd"].shape == (0, 3, 5)


@pytest.mark.parametrize("layout", ChannelLayout)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_samples(library, layout):
    functions, device = LIBRARIES[library]
    spec = group_spec(PassDirection.BACKWARD, layout)
    tensors = {name: tensor.to(device) for name, tensor in arrived(spec, samples=0).items()}
    outputs = run_operation(functions, spec, tensors)
    for name in ("x", "weight", "bias", "scale", "shift"):
        assert outputs[f"d{name}"].shape == tensors[name].shape
        assert outputs[f"d{name}"].dtype == tensors[name].dtype
        assert not outputs[f"d{name}"].any()


@pytest.mark.parametrize("direction", PassDirection)
def test_samples_without_rows_have_the_results_that_are_announced(direction):
    names = ("x", "residual") if direction is PassDirection.FORWARD else ("x", "residual", "dy")
    tensors = {name: torch.empty(3, 0, 8) for name in names} | {"weight": torch.randn(8).half()}
    tensors |= {"scale": torch.randn(3, 8), "gate": torch.randn(3, 8).bfloat16()}
    spec = NormSpec(Op.LAYER_NORM, direction, 1e-5, stats=direction is PassDirection.FORWARD)
    given = {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    outputs = run_operation(batch_invariant, spec, tensors)
    got = {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in outputs.items()}
    assert got == infer_result_specs(spec, given, None)
    assert not any(outputs[name].any() for name in outputs if name in ("dweight", "dscale", "dgate"))


ROWS = {
    "heads": {"of": (3, 8)},
    "an offset": {"weight_offset": 1.0},
    "a slope": {"activation": "leaky_relu", "negative_slope": -0.75},
    "a residual of its own type": {"residual": torch.float32},
    "all of it": {"of": (3, 8), "weight_offset": 1.0, "residual": torch.float32},
    "float8": {"weight_offset": 1.0, "residual": torch.float32, "out_dtype": DType.FLOAT8_E4M3FN},
}


@pytest.mark.parametrize("op", [Op.LAYER_NORM, Op.RMS_NORM])
@pytest.mark.parametrize("asked", ROWS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_rows_alone_take(library, asked, op):
    functions, device = LIBRARIES[library]
    options = dict(ROWS[asked])
    of, of_residual = options.pop("of", (8,)), options.pop("residual", torch.float16)
    tensors = {"x": torch.randn(4, 3, 8).half(), "residual": torch.randn(4, 3, 8).to(of_residual)}
    tensors["weight"] = torch.randn(of).half()
    if op is Op.LAYER_NORM:
        tensors["bias"] = torch.randn(of)
    for direction in (PassDirection.FORWARD,) if "out_dtype" in options else PassDirection:
        if direction is PassDirection.BACKWARD:
            tensors["dy"] = torch.randn(4, 3, 8).half()
        if len(of) == 1:
            tensors = {n: t.flatten(0, -2) if n not in ("weight", "bias") else t for n, t in tensors.items()}
        spec = NormSpec(op, direction, eps=1e-5, **options)
        got = run_operation(functions, spec, {name: tensor.to(device) for name, tensor in tensors.items()})
        named = dict(tensors)
        leading = [named.pop(name) for name in (("x",) if direction is PassDirection.FORWARD else ("dy", "x"))]
        named |= {"precision": torch.float64, "eps": 1e-5, "weight_offset": spec.weight_offset}
        named |= {"activation": spec.activation, "negative_slope": spec.negative_slope}
        if spec.out_dtype:
            named["out_dtype"] = torch.float8_e4m3fn
        want = getattr(reference, f"{op.value}_{direction.value}")(*leading, **named)
        assert_right({name: tensor.cpu() for name, tensor in got.items()}, want, moved=False)
        assert ("dresidual" in got) == (direction is PassDirection.BACKWARD and of_residual is torch.float32)
