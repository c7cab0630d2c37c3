"""A module with skip connections and shared weights, in one's own loop with gradient accumulation.

    python examples/skips_and_sharing.py

One block is applied several times, the last layer's weight is the first one's turned over, and
the input is added again in the middle. Esper is asked where this could grow, and grows it in two
named places. Seeds learn in a pass of their own (`seed_step`), which is best early in training.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper


class Denoiser(nn.Module):
    """Finds a signal [B, 32] in noise."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(32, width)
        self.shared = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.refine = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.enter(x)
        for _ in range(3):  # the same weights each time
            h = h + self.shared(h)
        h = torch.tanh(self.refine(h)) + first
        return x + F.linear(h, self.enter.weight.t(), self.bias)


def signals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    turns, shift = torch.rand(2, count, 1, generator=draw)
    clean = torch.sin((1 + 3 * turns) * torch.linspace(0, 6.28, 32) + 6.28 * shift)
    return clean + 0.5 * torch.randn(count, 32, generator=draw), clean


def main(epochs: int = 20, batches: int = 30, accumulate: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = Denoiser()
    noisy, clean = signals(1000, seed=1)
    print(esper.inspect(model, noisy[:8]))

    @torch.no_grad()
    def score(net: nn.Module) -> float:
        """How much of the noise is gone, in percent."""
        return 100.0 * (1.0 - float(F.mse_loss(net(noisy), clean) / F.mse_loss(noisy, clean)))

    host = esper.wrap(
        model,
        noisy[:8],
        slots=["refine", "enter"],
        budget=esper.Budget(params="+100%", epochs=epochs),
        isolation="dual_pass",
    )
    optimizer = host.optimizer(torch.optim.Adam, lr=3e-3)
    for epoch in range(epochs):
        total = 0.0
        for step in range(batches):
            x, y = signals(32, seed=1000 * epoch + step + 2)
            loss = F.mse_loss(host(x), y) / accumulate
            loss.backward()
            host.seed_step(lambda x=x, y=y: F.mse_loss(host(x), y) / accumulate)
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            total += float(loss.detach()) * accumulate
        tick = host.tick("heuristic", train_loss=total / batches, evaluate=score)
        print(f"epoch {tick.epoch:2d}  {tick.score:5.1f} %  +{tick.added}  {tick.decision}")
    return host.export()


if __name__ == "__main__":
    main()
