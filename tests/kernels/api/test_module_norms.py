"""torch's modules and this library's: names of arguments, and dtypes under CUDA's autocast."""

import io

import fusednorm
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

PAIRS = {
    "layer_norm": (nn.LayerNorm, fusednorm.LayerNorm, (8,)),
    "layer_norm of two axes": (nn.LayerNorm, fusednorm.LayerNorm, ((4, 8),)),
    "rms_norm": (nn.RMSNorm, fusednorm.RMSNorm, (8,)),
    "rms_norm without a weight": (nn.RMSNorm, fusednorm.RMSNorm, (8, 1e-6, False)),
    "group_norm": (nn.GroupNorm, fusednorm.GroupNorm, (2, 4)),
}


@pytest.fixture
def cuda_autocast():
    """CUDA's autocast is enabled, also where there is no CUDA, for tensors that only have shapes."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    with FakeTensorMode(), torch.no_grad():
        yield
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_cudas_autocast_gives_the_dtype_of_torchs_module(pair, dtype, cuda_autocast):
    theirs, ours, arguments = PAIRS[pair]
    x = torch.empty(3, 4, 8, device="cuda", dtype=dtype)
    parameters_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    got, want = (kind(*arguments, device="cuda", dtype=parameters_dtype)(x) for kind in (ours, theirs))
    assert got.dtype == want.dtype


@pytest.mark.parametrize("pair", PAIRS)
def test_the_cpus_autocast_gives_the_dtype_of_torchs_module(pair):
    theirs, ours, arguments = PAIRS[pair]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 4, 8, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            got, want = (kind(*arguments, dtype=dtype)(x) for kind in (ours, theirs))
        assert got.dtype == want.dtype


def test_a_compiled_module_follows_cudas_autocast(cuda_autocast):
    norm = fusednorm.LayerNorm(8, device="cuda")
    x = torch.empty(3, 8, device="cuda", dtype=torch.float16)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert compiled(x).dtype == torch.float32


def test_the_functions_keep_the_dtype_of_x(cuda_autocast):
    x = torch.empty(3, 8, device="cuda", dtype=torch.float16)
    assert fusednorm.layer_norm(x).dtype == torch.float16


@pytest.mark.parametrize("pair", PAIRS)
def test_the_input_has_the_name_that_it_has_in_torch(pair, device):
    theirs, ours, arguments = PAIRS[pair]
    theirs, ours = theirs(*arguments, device=device), ours(*arguments, device=device)
    x = torch.randn(3, 4, 8, device=device)
    name = "x" if "rms" in pair else "input"
    torch.testing.assert_close(ours(**{name: x}), theirs(**{name: x}), rtol=1e-4, atol=1e-4)


SCRIPTED = {
    "layer_norm": (fusednorm.LayerNorm(8, activation="silu"), (3, 8)),
    "layer_norm of two axes": (fusednorm.LayerNorm((4, 8), elementwise_affine=False), (3, 4, 8)),
    "rms_norm": (fusednorm.RMSNorm(8, weight_offset=1.0), (3, 8)),
    "layer_norm with a slope": (fusednorm.LayerNorm(8, activation="leaky_relu", negative_slope=-0.5), (3, 8)),
    "group_norm": (fusednorm.GroupNorm(2, 4), (3, 4, 8)),
    "group_norm with a slope": (fusednorm.GroupNorm(2, 4, activation="leaky_relu", negative_slope=-0.5), (3, 4, 8)),
}


@pytest.mark.parametrize("case", SCRIPTED)
@pytest.mark.filterwarnings("ignore:`torch.jit.\\w+` is deprecated:DeprecationWarning")
def test_scripted_modules_compute_and_are_saved(case):
    norm, shape = SCRIPTED[case]
    x = torch.randn(shape, requires_grad=True)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(norm), file)
    file.seek(0)
    scripted = torch.jit.load(file)
    for module in (torch.jit.script(norm), scripted):
        torch.testing.assert_close(module(x), norm(x))
        got, want = (torch.autograd.grad(each(x).sin().sum(), x) for each in (module, norm))
        torch.testing.assert_close(got, want)
    with pytest.raises((RuntimeError, torch.jit.Error), match=r"x must end in normalized_shape|divide C"):
        scripted(x[..., 1:] if "group" not in case else x[:, 1:])
