"""Every public function refuses tensors whose dtype is none of its own, by the argument's name."""

import fusednorm
import pytest
import torch
from fusednorm import KernelInputError, reference
from fusednorm.reference import chain as reference_chain

OTHERS = (
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
SETTINGS = 2, 1e-5, 0.0, "none", 0.0, 0


def tensors(op, device):
    """Arguments of `op` by name, all that any function of it takes."""
    shape = (2, 4, 3) if op == "group_norm" else (2, 3, 4)
    of_statistics = (2, 2) if op == "group_norm" else (2, 3)
    shapes = dict.fromkeys(("x", "dy", "residual", "dresidual_out"), shape)
    shapes |= dict.fromkeys(("weight", "bias"), (4,)) | dict.fromkeys(("mean", "rstd"), of_statistics)
    shapes |= dict.fromkeys(("scale", "shift"), (2, 4))
    return {name: torch.ones(size, device=device) for name, size in shapes.items()}


def taken(op, direction="forward", added=True):
    names = ["x", "weight"]
    if op != "rms_norm":
        names.append("bias")
    if op == "group_norm":
        names += ["scale", "shift"]
    if added:
        names.append("residual")
    if direction == "backward":
        names += ["dy", "dresidual_out", "rstd"] + (["mean"] if op != "rms_norm" else [])
    return names


def differentiable(op, added):
    function = getattr(fusednorm, f"add_{op}" if added else op)
    groups = {"num_groups": 2} if op == "group_norm" else {}
    return lambda **given: function(**given, **groups)


def passes(library, op, direction):
    function = getattr(library, f"{op}_{direction}")
    groups = {"num_groups": 2} if op == "group_norm" else {}
    return lambda **given: function(**given, **groups)


def operator(op, direction):
    order = ["x", "weight", "bias", "residual", "scale", "shift"]
    if direction == "backward":
        order = ["dy", "x", "weight", "bias", "mean", "rstd", "residual", "scale", "shift", "dresidual_out"]
    function = getattr(torch.ops.fusednorm, op if direction == "forward" else f"{op}_backward")
    return lambda **given: function(*(given.get(name) for name in order), *SETTINGS)


def module(kind):
    return lambda x: kind(4).to(x.device)(x)


def chain(function):
    return lambda x, weight, bias: function(x, [weight, None], [None, bias])


OPERATIONS = ("layer_norm", "rms_norm", "group_norm")
FUNCTIONS = {
    **{
        f"add_{op}" if a else op: (op, differentiable(op, a), taken(op, added=a))
        for op in OPERATIONS
        for a in (0, 1)
    },
    **{
        f"{name}{op}_{direction}": (op, make(op, direction), taken(op, direction))
        for op in OPERATIONS
        for direction in ("forward", "backward")
        for name, make in (
            ("", lambda op, direction: passes(fusednorm, op, direction)),
            ("reference.", lambda op, direction: passes(reference, op, direction)),
            ("torch.ops.", operator),
        )
    },
    "LayerNorm": ("layer_norm", module(fusednorm.LayerNorm), ["x"]),
    "RMSNorm": ("rms_norm", module(fusednorm.RMSNorm), ["x"]),
    "GroupNorm": ("group_norm", module(lambda channels: fusednorm.GroupNorm(2, channels)), ["x"]),
    "layer_norm_chain": ("layer_norm", chain(fusednorm.layer_norm_chain), ["x", "weight", "bias"]),
    "reference_chain": ("layer_norm", chain(reference_chain.layer_norm_chain), ["x", "weight", "bias"]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_dtypes_are_refused(name, device):
    op, call, names = FUNCTIONS[name]
    given = {argument: tensor for argument, tensor in tensors(op, device).items() if argument in names}
    with torch.no_grad():
        call(**given)
    for argument, tensor in given.items():
        for dtype in OTHERS:
            # Only those that no kernel has an input or result of are named as torch prints them.
            name = str(dtype).removeprefix("torch.")
            with pytest.raises(KernelInputError, match=rf"{argument}.* must be float32.*got (torch\.)?{name}"):
                call(**given | {argument: tensor.to(dtype)})


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "." not in name and "_norm_" not in name])
def test_they_are_refused_where_gradients_are_wanted_and_in_a_trace(name, device):
    op, call, names = FUNCTIONS[name]
    given = {argument: tensor for argument, tensor in tensors(op, device).items() if argument in names}
    given["x"] = given["x"].long()
    for argument in given.keys() - {"x"}:
        given[argument].requires_grad_()
    with pytest.raises(KernelInputError, match="x must be float32"):
        call(**given)
    if name not in ("layer_norm_chain", "reference_chain", "LayerNorm", "RMSNorm", "GroupNorm"):
        with pytest.raises(KernelInputError, match="x must be float32"):
            call(**{argument: tensor.detach().to("meta") for argument, tensor in given.items()})


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith("reference.")])
def test_the_reference_takes_the_shapes_of_the_contract_alone(name, device):
    op, call, names = FUNCTIONS[name]
    given = {argument: tensor for argument, tensor in tensors(op, device).items() if argument in names}
    for argument, tensor in given.items():
        if argument == "x":
            continue
        # As many elements in another shape, and what torch would broadcast.
        for other in (tensor.reshape(1, *tensor.shape), tensor.flatten()[:1], tensor[..., None]):
            with pytest.raises(KernelInputError, match="needs (bias|weight) " if argument == "bias" else argument):
                call(**given | {argument: other})


def test_float64_is_for_the_cpu_alone():
    x = torch.randn(3, 4, dtype=torch.float64)
    assert fusednorm.layer_norm(x).dtype == torch.float64
    with pytest.raises(KernelInputError, match=r"x must be float32, float16 or bfloat16, got torch\.float64"):
        fusednorm.layer_norm_forward(x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("op", OPERATIONS)
def test_results_are_floats(op, dtype, device):
    given = tensors(op, device)
    groups = {"num_groups": 2} if op == "group_norm" else {}
    for library in (fusednorm, reference):
        forward = getattr(library, f"{op}_forward")
        with pytest.raises(KernelInputError, match=f"out_dtype must be float32.* got {dtype}"):
            forward(given["x"], **groups, out_dtype=dtype)
    with pytest.raises(KernelInputError, match=f"precision must be float32 or float64, got {dtype}"):
        getattr(reference, f"{op}_forward")(given["x"], **groups, precision=dtype)
    with pytest.raises(KernelInputError, match=f"out_dtype must be float32.* got {dtype}"):
        reference_chain.layer_norm_chain(given["x"], [None], out_dtype=dtype)
