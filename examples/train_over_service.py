"""Train a model whose norms run in the service, forward and backward.

    pip install normserve torch
    normserve serve --local /tmp/normserve.sock
    python examples/train_over_service.py --url unix:///tmp/normserve.sock     # or http://127.0.0.1:8000

The parameters belong to the model and are sent with each call, so the optimizer trains them like any others.
"""

import argparse

import torch
from normserve.client import Client
from normserve.client.torch import GroupNorm
from torch import nn
from torch.nn.functional import mse_loss


def denoiser(client: Client, channels: int = 32) -> nn.Module:
    """A small convolutional network; GroupNorm and SiLU of each block are one call."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        GroupNorm(8, channels, activation="silu", client=client),
        nn.Conv2d(channels, channels, 3, padding=1),
        GroupNorm(8, channels, activation="silu", client=client),
        nn.Conv2d(channels, 1, 3, padding=1),
    )


def train(model: nn.Module, images: torch.Tensor, steps: int) -> list[float]:
    """The loss of each step in removing noise.

    Args:
        images: [batch, 1, height, width] float32.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    noisy = images + 0.3 * torch.randn_like(images)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(noisy), images)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = torch.linspace(0, 6.3, 32)
    images = torch.sin(rows[:, None] * torch.arange(1, 9)[:, None, None, None]) * torch.cos(rows)
    with Client(options.url) as client:
        losses = train(denoiser(client), images, options.steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {options.steps} steps, norms at {options.url}")


if __name__ == "__main__":
    main()
