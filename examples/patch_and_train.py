"""Replace the norms of a torch model by fused ones and train it.

    pip install fusednorm
    python examples/patch_and_train.py

Without a GPU the patched model runs on torch's CPU kernels: the same results, no gain in speed.
"""

import argparse

import fusednorm
import torch
from torch import nn
from torch.nn.functional import cross_entropy

WIDTH, CLASSES = 128, 10


def classifier() -> nn.Module:
    """Two encoder layers over a sequence of vectors, and a LayerNorm before the last projection."""
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=2 * WIDTH, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2)
    return nn.Sequential(encoder, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))


def train(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, steps: int) -> list[float]:
    """The loss of each step.

    Args:
        x: [batch, positions, WIDTH] float32.
        labels: [batch] int64, below CLASSES.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x).mean(dim=1), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(16, 32, WIDTH, device=device)
    labels = torch.randint(CLASSES, (16,), device=device)
    model = classifier().to(device)
    print(fusednorm.patch(model))
    losses = train(model, x, labels, steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps on {device}")


if __name__ == "__main__":
    main()
