"""The models: real architectures with random weights and no dropout, with their inputs and losses.

Models of transformers and timm need these packages; others are defined in this package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.diffusion_models import DiffusionTransformer
from benchmarks.models.image_models import LATENT_CHANNELS, make_residual_blocks, make_vae_decoder
from benchmarks.models.volume_models import VolumeUNet

Shape = tuple[int, ...]
Inputs = dict[str, Any]

DTYPE = torch.bfloat16

_VOCABULARY = 30_000
"""Number of tokens to draw from; no model has fewer."""


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """One model.

    Attributes:
        build: creates it for a shape of the batch, with parameters in float32 on the default device.
        forward_inputs: inputs of its forward pass by name, for the batch's shape, on a device.
        step_inputs: additional inputs of a training step.
        loss: computes a scalar from the result of its forward pass with all inputs.
        memory_format: of inputs and weights with as many axes as it has.
    """

    build: Callable[[Shape], nn.Module]
    forward_inputs: Callable[[Shape, str], Inputs]
    step_inputs: Callable[[Inputs], Inputs]
    loss: Callable[[Any], Tensor]
    memory_format: torch.memory_format = torch.contiguous_format

    def make_model(self, shape: Shape, device: str, seed: int = 0) -> nn.Module:
        """The model in bfloat16; the same weights for the same seed, no vector of them ones or zeros.

        The effect of a norm's weight and bias shows in a loss only if they do not have torch's initial values.
        """
        torch.manual_seed(seed)
        with torch.device(device):
            model = self.build(shape)
        model = model.to(device=device, dtype=DTYPE).train()
        model.to(memory_format=self.memory_format)  # type: ignore[call-overload]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model


def _make_gpt2(_: Shape) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False, **dropouts))
    return model


def _make_bert(_: Shape) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    model: nn.Module = BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    return model


def _make_llama(_: Shape) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=4,
        num_attention_heads=32,
        vocab_size=32000,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _make_timm_model(name: str) -> Callable[[Shape], nn.Module]:
    def make_model(_: Shape) -> nn.Module:
        from timm import create_model

        model: nn.Module = create_model(name, pretrained=False)
        return model

    return make_model


def _make_tokens(shape: Shape, device: str) -> Inputs:
    return {"input_ids": torch.randint(0, _VOCABULARY, shape, device=device)}


def _make_labels(inputs: Inputs) -> Inputs:
    return {"labels": inputs["input_ids"]}


def _get_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _make_language_architecture(build: Callable[[Shape], nn.Module]) -> ModelArchitecture:
    return ModelArchitecture(build, _make_tokens, _make_labels, _get_loss)


def _make_image_inputs(
    name: str, memory_format: torch.memory_format = torch.contiguous_format
) -> Callable[[Shape, str], Inputs]:
    def make_inputs(shape: Shape, device: str) -> Inputs:
        x = torch.randn(shape, device=device, dtype=DTYPE)
        return {name: x.contiguous(memory_format=memory_format)}

    return make_inputs


def _make_latents(shape: Shape, device: str) -> Inputs:
    """Latents for images of that shape, which are eight times as high and wide."""
    n, _, h, w = shape
    return _make_image_inputs("input", torch.channels_last)((n, LATENT_CHANNELS, h // 8, w // 8), device)


def _make_conditioned_tokens(shape: Shape, device: str) -> Inputs:
    """Tokens of that shape, [N, tokens, width], and a condition of each sample."""
    n, _, width = shape
    x, condition = (torch.randn(size, device=device, dtype=DTYPE) for size in (shape, (n, width)))
    return {"x": x, "condition": condition}


def _compute_mean_square(output: Any) -> Tensor:
    loss: Tensor = output.float().square().mean()
    return loss


def _make_no_inputs(_: Inputs) -> Inputs:
    return {}


def _make_image_architecture(
    build: Callable[[Shape], nn.Module],
    make_inputs: Callable[[Shape, str], Inputs],
    memory_format: torch.memory_format = torch.contiguous_format,
) -> ModelArchitecture:
    return ModelArchitecture(build, make_inputs, _make_no_inputs, _compute_mean_square, memory_format)


ARCHITECTURES = {
    "gpt2": _make_language_architecture(_make_gpt2),
    "bert": _make_language_architecture(_make_bert),
    "llama": _make_language_architecture(_make_llama),
    "vit": _make_image_architecture(_make_timm_model("vit_base_patch16_224"), _make_image_inputs("x")),
    "convnext": _make_image_architecture(_make_timm_model("convnext_base"), _make_image_inputs("x")),
    "dit": _make_image_architecture(lambda shape: DiffusionTransformer(shape[2]), _make_conditioned_tokens),
    "blocks": _make_image_architecture(
        lambda shape: make_residual_blocks(shape[1]),
        _make_image_inputs("input", torch.channels_last),
        torch.channels_last,
    ),
    "vae_decoder": _make_image_architecture(lambda _: make_vae_decoder(), _make_latents, torch.channels_last),
    "unet3d": _make_image_architecture(
        lambda shape: VolumeUNet(shape[1]), _make_image_inputs("x", torch.channels_last_3d), torch.channels_last_3d
    ),
}
"""Architectures by their name in the CSV's column layout: GPT-2 small, BERT-base, four layers of Llama 7B,
ViT-B/16, ConvNeXt-B, the blocks of DiT-XL, eight residual blocks, Stable Diffusion's decoder, nnU-Net's U-Net."""
