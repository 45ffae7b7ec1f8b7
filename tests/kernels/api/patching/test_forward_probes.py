"""What the results of a norm's forward on random data show."""

import torch
from fusednorm.api.patching.forward_probes import ForwardProbe, ProbeSet, copy_without_hooks
from fusednorm.api.patching.norm_formulas import NormFormula
from torch import nn

from tests.kernels.api.patching.norms import (
    ClampedRMSNorm,
    DetachedRMSNorm,
    FP32LayerNorm,
    GemmaRMSNorm,
    LlamaRMSNorm,
    NormalizeRMSNorm,
    StridedRMSNorm,
    T5LayerNorm,
)

RMS_NORM = NormFormula("rms_norm", "weight", None)
LAYER_NORM = NormFormula("layer_norm", "weight", "bias")
LOW, HIGH = torch.bfloat16, torch.float32


def test_results_are_compared_with_a_formula():
    probe = ForwardProbe(LlamaRMSNorm(8), (3, 2, 8), 1e-6)
    assert probe.matches_formula(RMS_NORM)
    assert not probe.matches_formula(NormFormula("rms_norm", "weight", None, weight_offset=1.0))
    assert not probe.matches_formula(NormFormula("layer_norm", "weight", None))


def test_an_eps_is_told_from_others():
    assert not ForwardProbe(LlamaRMSNorm(8, eps=1e-6), (3, 2, 8), 1e-5).matches_formula(RMS_NORM)
    assert not ForwardProbe(LlamaRMSNorm(8, eps=1e-6), (3, 2, 8), 1e-8).matches_formula(RMS_NORM)


def test_result_dtypes_are_those_of_the_forward():
    of_llama, of_t5, of_gemma = (
        ForwardProbe(kind(8), (3, 8), 1e-6).find_result_dtypes(
            NormFormula("rms_norm", "weight", None, weight_offset=float(kind is GemmaRMSNorm))
        )
        for kind in (LlamaRMSNorm, T5LayerNorm, GemmaRMSNorm)
    )
    assert (of_llama[LOW, HIGH], of_t5[LOW, HIGH], of_gemma[LOW, HIGH]) == (HIGH, HIGH, LOW)
    assert (of_llama[HIGH, LOW], of_t5[HIGH, LOW], of_gemma[HIGH, LOW]) == (HIGH, LOW, HIGH)


def test_autocast_reaches_the_functions_of_a_forward():
    class FunctionalLayerNorm(nn.LayerNorm):
        def forward(self, x):
            return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias)

    probe = ForwardProbe(FunctionalLayerNorm(8), (3, 8), 1e-5)
    assert probe.find_result_dtypes(LAYER_NORM)[LOW, LOW] is LOW
    assert probe.find_autocast_dtypes(LAYER_NORM)[LOW, LOW] is HIGH


class HighParametersNorm(FP32LayerNorm):
    """Takes parameters in float32 alone."""

    def forward(self, inputs):
        x = inputs.float()
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias).to(inputs.dtype)


def test_parameters_in_float32_are_tried_if_others_are_refused():
    probe = ForwardProbe(HighParametersNorm(8), (3, 8), 1e-5)
    assert probe.matches_formula(LAYER_NORM)
    assert (LOW, LOW) not in probe.find_result_dtypes(LAYER_NORM)
    assert probe.find_result_dtypes(LAYER_NORM)[LOW, HIGH] is LOW


def test_dtypes_with_other_results_are_left_out():
    found = ForwardProbe(ClampedRMSNorm(8), (3, 8), 1e-6).find_result_dtypes(RMS_NORM)
    assert {x_dtype for x_dtype, _ in found} == {LOW, HIGH}


def test_strides_and_gradients_are_compared():
    for kind, strides, gradients in (
        (LlamaRMSNorm, True, True),
        (StridedRMSNorm, False, True),
        (DetachedRMSNorm, True, False),
    ):
        for shape in ((3, 8), (3, 2, 8), (3, 2, 2, 8)):
            probe = ForwardProbe(kind(8), shape, 1e-6)
            assert probe.matches_formula(RMS_NORM)
            assert (probe.matches_strides(RMS_NORM), probe.matches_gradients(RMS_NORM)) == (strides, gradients)


def test_a_forward_without_gradients_does_not_match():
    class InferenceNorm(LlamaRMSNorm):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    assert not ForwardProbe(InferenceNorm(8), (3, 8), 1e-6).matches_gradients(RMS_NORM)


def test_a_changed_x_is_seen():
    class InPlaceNorm(LlamaRMSNorm):
        def forward(self, x):
            return x.copy_(super().forward(x))

    probe = ForwardProbe(InPlaceNorm(8), (3, 8), 1e-6)
    assert probe.matches_formula(RMS_NORM)
    assert probe.changed == "x"


def test_the_least_scale_shows_another_eps():
    formula = NormFormula("rms_norm", "gamma", None)
    for least_scale, matches in ((None, False), (1e-16, True)):
        probe = ForwardProbe(NormalizeRMSNorm(8), (3, 8), 1e-24 / 8, least_scale=least_scale)
        assert probe.matches_formula(formula) == matches


class ImagesNorm(LlamaRMSNorm):
    """Takes images alone, and has its channels first."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_the_ranks_that_agree_are_found():
    rows = NormFormula("rms_norm", "weight", None)
    channels = NormFormula("rms_norm", "weight", None, layout="nchw")
    found = [set(ProbeSet(LlamaRMSNorm(8), [(8,)], 1e-6).find_matching_probes(each)) for each in (rows, channels)]
    assert found == [{2, 3, 4, 5}, set()]
    of_images = ProbeSet(ImagesNorm(8), [(8,)], 1e-6)
    assert [set(of_images.find_matching_probes(each)) for each in (rows, channels)] == [set(), {4}]
    assert of_images.find_error() == ""


def test_an_error_is_told_if_there_is_no_result():
    class RaisingNorm(LlamaRMSNorm):
        def forward(self, x):
            raise NotImplementedError

    probes = ProbeSet(RaisingNorm(8), [(8,)], 1e-6)
    assert not probes.find_matching_probes(RMS_NORM)
    assert probes.find_error() == "NotImplementedError"


def test_a_copy_has_the_modules_attributes_and_no_hooks():
    module = nn.GELU("tanh").eval()
    module.register_forward_hook(lambda *_: 1 / 0)
    copied = copy_without_hooks(module)
    assert (type(copied), copied.approximate, copied.training) == (nn.GELU, "tanh", False)
    x = torch.randn(3)
    torch.testing.assert_close(copied(x), nn.functional.gelu(x, approximate="tanh"))
