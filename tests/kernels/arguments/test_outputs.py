"""Results go where the caller wants them, with the same bits, or the call says why not."""

import fusednorm
import pytest
import torch
from fusednorm.errors import KernelInputError
from fusednorm.results import Backward, Forward

SHAPE = (2, 8, 3, 5)


def arguments(op, backward, device, dtype=torch.float16, channels_last=False):
    """Everything that makes an operation return all it can."""
    grouped = op == "group_norm"
    shape = SHAPE if grouped else (3, 40)

    def like_x():
        tensor = torch.randn(shape, device=device).to(dtype)
        return tensor.to(memory_format=torch.channels_last) if channels_last else tensor

    size = 8 if grouped else 40
    options = {"residual": like_x(), "weight": torch.randn(size, device=device)}
    if op != "rms_norm":
        options["bias"] = torch.randn(size, device=device)
    if grouped:
        options |= {"scale": torch.randn(2, 8, device=device), "shift": torch.randn(2, 8, device=device)}
    leading = (like_x(), like_x()) if backward else (like_x(),)
    if not backward:
        options["stats"] = True
    return (*leading, 4) if grouped else leading, options


def poisoned_like(result):
    """As many tensors as are the result's own, full of NaN."""
    shared = {"dresidual"} if isinstance(result, Backward) else set()
    return type(result)(
        *(
            None if tensor is None or name in shared else torch.full_like(tensor, float("nan"))
            for name, tensor in result._asdict().items()
        )
    )


@pytest.mark.parametrize(
    ("op", "channels_last"),
    [("layer_norm", False), ("rms_norm", False), ("group_norm", False), ("group_norm", True)],
)
@pytest.mark.parametrize("backward", [False, True])
def test_results_are_written_where_the_caller_wants_them(op, channels_last, backward, device):
    function = getattr(fusednorm, f"{op}_{'backward' if backward else 'forward'}")
    leading, options = arguments(op, backward, device, channels_last=channels_last)
    wanted = function(*leading, **options)
    out = poisoned_like(wanted)
    # The second call takes the short way.
    for _ in range(2):
        got = function(*leading, **options, out=out)
        for name, given in out._asdict().items():
            if given is not None:
                assert getattr(got, name) is given, name
                assert torch.equal(given, getattr(wanted, name)), name


def test_what_is_not_given_is_allocated(device):
    (x,), options = arguments("layer_norm", False, device)
    y = torch.empty_like(x)
    for _ in range(2):
        got = fusednorm.layer_norm_forward(x, **options, out=Forward(y))
        assert got.y is y
        assert got.mean.shape == got.rstd.shape == (3,)
        assert torch.equal(got.residual_out, x + options["residual"])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.new_empty(3, 41),
        lambda x: x.new_empty(4, 40),
        lambda x: x.new_empty(3, 40, dtype=torch.float32),
        lambda x: x.new_empty(40, 3).T,
        lambda x: x.new_empty(3, 40, device="meta"),
    ],
)
def test_tensor_that_cannot_hold_its_result_is_refused(wrong, device):
    (x,), options = arguments("layer_norm", False, device)
    fusednorm.layer_norm_forward(x, **options)
    with pytest.raises(KernelInputError, match=r"out\.y must be contiguous torch\.float16 \[3, 40\]"):
        fusednorm.layer_norm_forward(x, **options, out=Forward(wrong(x)))


def test_layout_is_that_of_x(device):
    leading, options = arguments("group_norm", False, device, channels_last=True)
    with pytest.raises(KernelInputError, match=r"out\.y must be .* laid out as x"):
        fusednorm.group_norm_forward(*leading, **options, out=Forward(torch.empty(SHAPE, device=device).half()))


@pytest.mark.parametrize("name", ["mean", "rstd", "residual_out", "y_scale"])
def test_tensor_for_what_is_not_returned_is_refused(name, device):
    x = torch.randn(3, 40, device=device)
    fusednorm.layer_norm_forward(x)
    with pytest.raises(KernelInputError, match=rf"out\.{name} must be None"):
        fusednorm.layer_norm_forward(x, out=Forward(torch.empty_like(x))._replace(**{name: torch.empty_like(x)}))


def test_gradient_that_is_dx_has_no_place_of_its_own(device):
    leading, options = arguments("rms_norm", True, device)
    dx = torch.empty_like(leading[0])
    with pytest.raises(KernelInputError, match=r"out\.dresidual must be None"):
        fusednorm.rms_norm_backward(*leading, **options, out=Backward(dx, dresidual=torch.empty_like(dx)))
    got = fusednorm.rms_norm_backward(*leading, **options, out=Backward(dx))
    assert got.dx is got.dresidual is dx
