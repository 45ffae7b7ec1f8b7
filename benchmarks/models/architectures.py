"""The models: real architectures with random weights and no dropout, with their inputs and losses.

Models of transformers and timm need these packages; other image models are defined here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.images import LATENT_CHANNELS, residual_blocks, vae_decoder

Shape = tuple[int, ...]
Inputs = dict[str, Any]

DTYPE = torch.bfloat16

_VOCABULARY = 30_000
"""Number of tokens to draw from; no model has fewer."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model.

    Attributes:
        build: creates it for a shape of the batch, with parameters in float32 on the default device.
        forward_inputs: inputs of its forward pass by name, for the batch's shape, on a device.
        step_inputs: additional inputs of a training step.
        loss: computes a scalar from the result of its forward pass with all inputs.
        channels_last: whether images have this layout.
    """

    build: Callable[[Shape], nn.Module]
    forward_inputs: Callable[[Shape, str], Inputs]
    step_inputs: Callable[[Inputs], Inputs]
    loss: Callable[[Any], Tensor]
    channels_last: bool = False

    def made(self, shape: Shape, device: str, seed: int = 0) -> nn.Module:
        """The model in bfloat16; the same weights for the same seed, no vector of them ones or zeros.

        The effect of a norm's weight and bias shows in a loss only if they do not have torch's initial values.
        """
        torch.manual_seed(seed)
        with torch.device(device):
            model = self.build(shape)
        model = model.to(device=device, dtype=DTYPE).train()
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model


def _gpt2(_: Shape) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False, **dropouts))
    return model


def _bert(_: Shape) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    model: nn.Module = BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    return model


def _llama(_: Shape) -> nn.Module:
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


def _vit(_: Shape) -> nn.Module:
    from timm import create_model

    model: nn.Module = create_model("vit_base_patch16_224", pretrained=False)
    return model


def _tokens(shape: Shape, device: str) -> Inputs:
    return {"input_ids": torch.randint(0, _VOCABULARY, shape, device=device)}


def _labels(inputs: Inputs) -> Inputs:
    return {"labels": inputs["input_ids"]}


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _language(build: Callable[[Shape], nn.Module]) -> Architecture:
    return Architecture(build, _tokens, _labels, _own_loss)


def _images(name: str, channels_last: bool = False) -> Callable[[Shape, str], Inputs]:
    def inputs(shape: Shape, device: str) -> Inputs:
        x = torch.randn(shape, device=device, dtype=DTYPE)
        return {name: x.contiguous(memory_format=torch.channels_last) if channels_last else x}

    return inputs


def _latents(shape: Shape, device: str) -> Inputs:
    """Latents for images of that shape, which are eight times as high and wide."""
    n, _, h, w = shape
    return _images("input", channels_last=True)((n, LATENT_CHANNELS, h // 8, w // 8), device)


def _mean_square(output: Any) -> Tensor:
    loss: Tensor = output.float().square().mean()
    return loss


def _nothing(_: Inputs) -> Inputs:
    return {}


ARCHITECTURES = {
    "gpt2": _language(_gpt2),
    "bert": _language(_bert),
    "llama": _language(_llama),
    "vit": Architecture(_vit, _images("x"), _nothing, _mean_square),
    "blocks": Architecture(
        lambda shape: residual_blocks(shape[1]), _images("input", True), _nothing, _mean_square, channels_last=True
    ),
    "vae_decoder": Architecture(lambda _: vae_decoder(), _latents, _nothing, _mean_square, channels_last=True),
}
"""Architectures by their name in the CSV's column layout: GPT-2 small, BERT-base, four layers of Llama 7B,
ViT-B/16, eight residual blocks, Stable Diffusion's decoder."""
