"""An MLP on a table: one call of `esper.grow`.

    python examples/table_mlp.py

The table is made up: ten columns, and a class that depends on products of some of them, which a
narrow network does not find by itself.
"""

import torch
from torch import Tensor, nn

import esper
from esper.api import GrownRun, GrowthDecision


def make_table(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Columns [rows, 10] and classes [rows] from 0 to 3."""
    columns = torch.randn(rows, 10, generator=torch.Generator().manual_seed(seed))
    first = columns[:, 0] * columns[:, 1] + columns[:, 2] > 0
    second = columns[:, 3] * columns[:, 4] * columns[:, 5].sign() > 0
    return columns, 2 * first.long() + second.long()


def main(epochs: int = 24, rows: int = 4000) -> GrownRun:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)
    )
    run = esper.grow(
        model,
        make_table(rows, seed=1),
        make_table(1000, seed=2),
        test=make_table(1000, seed=3),
        loss="cross_entropy",
        budget=esper.Budget(params="+60%", epochs=epochs),
        lr=3e-3,
        on_epoch=lambda record: print(
            f"epoch {record['epoch']:2d}  accuracy {record['score']:5.1f}",
            GrowthDecision(**record["decision"]),
        ),
    )
    print(run.report())
    plain = run.export()  # an nn.Module without Esper
    print(f"{sum(p.numel() for p in plain.parameters()):,} parameters in the exported network")
    return run


if __name__ == "__main__":
    main()
