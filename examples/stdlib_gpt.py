"""A tiny GPT on the source code of Python's standard library, in a training loop of one's own.

    python examples/stdlib_gpt.py

Four calls beside the loop that was there: `wrap`, `optimizer`, `tick`, and `export` at the end.
The learning-rate scheduler and the clipping of gradients stay as they are.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.api import score_of_loss
from esper.tolaria import find_task


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, width: int = 32, context: int = 64) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))


def main(epochs: int = 16, steps: int = 100) -> list[float]:
    splits = find_task("stdlib").load(0)
    held_out = splits.validation.take(torch.arange(64))
    torch.manual_seed(0)
    model = Gpt()

    @torch.no_grad()
    def loss_of(net: nn.Module) -> float:
        return float(F.cross_entropy(net(held_out.inputs).flatten(0, 1), held_out.labels.flatten()))

    first, losses = loss_of(model), []
    budget = esper.Budget(params="+15%", epochs=epochs)
    host = esper.wrap(model, held_out.inputs[:8], slots="auto", budget=budget)
    optimizer = host.optimizer(torch.optim.AdamW, lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randint(splits.train.samples, (steps, 16)):
            text, following = splits.train.take(rows)
            loss = F.cross_entropy(host(text).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the model's; seeds are on their own
            optimizer.step()
            total += float(loss.detach())
        scheduler.step()
        tick = host.tick(
            train_loss=total / steps, evaluate=lambda net: score_of_loss(loss_of(net), first)
        )
        losses.append(loss_of(host))
        print(f"epoch {tick.epoch:2d}  {losses[-1]:.3f} nats  +{tick.added:,}  {tick.decision}")
    plain = host.export()
    print(f"exported: {sum(p.numel() for p in plain.parameters()):,} parameters")
    return losses


if __name__ == "__main__":
    main()
