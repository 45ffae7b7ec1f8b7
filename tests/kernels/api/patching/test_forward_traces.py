"""Whether a norm's forward chooses its steps by the sizes of x, seen without data."""

import pytest
import torch
from fusednorm.api.patching.forward_traces import find_deciding_shape, trace_forward
from fusednorm.api.patching.norm_formulas import NormFormula
from torch import nn

from tests.kernels.api.patching.norms import (
    CohereLayerNorm,
    GroupNormAct,
    LayerNorm2d,
    LlamaRMSNorm,
    OneSampleRMSNorm,
    SizedAxisRMSNorm,
    UnweightedRMSNorm,
)

ROWS = NormFormula("rms_norm", "weight", None)
CHANNELS = NormFormula("layer_norm", "weight", "bias", layout="nchw")
GROUPS = NormFormula("group_norm", "weight", "bias", num_groups=2)


@pytest.mark.parametrize(
    ("norm", "formula", "size"),
    [
        (LlamaRMSNorm(8), ROWS, (8,)),
        (LlamaRMSNorm(2**14), ROWS, (2**14,)),
        (CohereLayerNorm((4, 8)), ROWS, (4, 8)),
        (UnweightedRMSNorm(), ROWS, (8,)),
        (LayerNorm2d(8), CHANNELS, (8,)),
        (GroupNormAct(8), GROUPS, (8,)),
    ],
)
@pytest.mark.parametrize("rank", [3, 4])
def test_steps_are_the_same_for_all_sizes(norm, formula, size, rank):
    if not (isinstance(norm, LayerNorm2d) and rank == 3):
        assert find_deciding_shape(norm, formula, rank, size, training=False) is None


@pytest.mark.parametrize("width", [8, 101, 2**14])
def test_an_axis_chosen_by_its_size_is_found(width):
    assert find_deciding_shape(SizedAxisRMSNorm(width), ROWS, 4, (width,), training=False)[1] == width


def test_one_sample_is_tried():
    assert find_deciding_shape(OneSampleRMSNorm(8), ROWS, 2, (8,), training=False) == (1, 8)


class AttributeNorm(UnweightedRMSNorm):
    """Computes something else for as many positions as an attribute says."""

    def __init__(self):
        super().__init__()
        self.window = (7, 64)

    def forward(self, x):
        return super().forward(x) * (2 if x.shape[1] == self.window[1] else 1)


class SquareNorm(UnweightedRMSNorm):
    """Computes something else for square images."""

    def forward(self, x):
        return super().forward(x if x.shape[1] != x.shape[2] else x * x)


class SqueezingNorm(UnweightedRMSNorm):
    """Returns fewer axes for some sizes."""

    def forward(self, x):
        return super().forward(x).squeeze()


@pytest.mark.parametrize("kind", [AttributeNorm, SquareNorm, SqueezingNorm])
def test_other_choices_by_sizes_are_found(kind):
    assert find_deciding_shape(kind(), ROWS, 4, (8,), training=False) is not None


class DeviceNorm(UnweightedRMSNorm):
    """Uses the name of the device and a reshaped x."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.reshape(x.shape[0] * x.shape[1], -1)).view(x.shape)


class PlacedNorm(LlamaRMSNorm):
    """Creates a tensor on the device of x, and moves its weight there."""

    def forward(self, x):
        columns = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
        return x * self.weight.to(x.device) + columns


def test_tensors_are_placed_where_x_is():
    assert find_deciding_shape(PlacedNorm(8), ROWS, 3, (8,), training=False) is None


def test_sizes_in_arguments_are_no_choice():
    assert find_deciding_shape(DeviceNorm(), ROWS, 3, (8,), training=False) is None


class PeakNorm(UnweightedRMSNorm):
    """Looks at the values of x."""

    def forward(self, x):
        return super().forward(x / 2 if x.abs().max() > 1e4 else x)


def test_a_step_that_needs_data_raises():
    with pytest.raises(RuntimeError, match="meta"):
        trace_forward(PeakNorm(), (3, 8), training=False)


def test_the_training_mode_is_the_given_one():
    class ModeNorm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x * 2 if self.training else x)

    modes = [len(trace_forward(ModeNorm(8), (3, 8), training)) for training in (False, True)]
    assert modes[1] == modes[0] + 1
