"""A peer on the same host and data: the library `gromo` grows the dense host on MNIST-1D.

    python benchmarks/peers/gromo_peer.py --venv FOLDER --out STUDY/gromo.json [--with REQUIREMENT]

It needs packages that Esper does not, so it gets an environment of its own in the folder you name,
made on first use (`--with` adds a requirement, such as a build of torch for the CPU). The splits
are written to a file that the environment reads; `gromo_worker.py` trains there. Left
in the folder of `python -m studies c1`, the results become part of its report.

Same epochs, batches and splits as the study's; learning rates from the same grid, chosen by
validation scores on other seeds; parameters up to those of the network that Esper grew.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from esper.garden.cases import EVALUATION_SEED
from esper.garden.contexts import Context
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.leyline.ops import Blend
from esper.tolaria.tasks import GARDEN_BATCH, GARDEN_BATCHES

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the studies are
from studies.growth_pays import RATES, TUNING_SEED, growth_of

GROMO = "gromo==0.1.0"
SUITE, CONTEXT = "garden_mlp", "mnist1d-4000"
HIDDEN, LAYERS = 16, 2  # of the dense host
WORKER = Path(__file__).with_name("gromo_worker.py")


def environment(folder: Path, extra: list[str]) -> Path:
    """The interpreter of an environment that has the library, made where it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)  # noqa: S603
        words = [str(python), "-m", "pip", "install", *extra, GROMO]
        subprocess.run(words, check=True)  # noqa: S603
    return python


def export_splits(context: Context, path: Path) -> None:
    splits = context.source.load()
    arrays = {}
    for name, split in splits.named().items():
        arrays[f"{name}_inputs"] = split.inputs.numpy()
        arrays[f"{name}_labels"] = split.labels.numpy()
    np.savez(path, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--with", dest="extra", action="append", default=[])
    parser.add_argument("--tuning", type=int, default=4, help="seeds that choose the rate")
    parser.add_argument("--seeds", type=int, default=16, help="seeds that are reported")
    options = parser.parse_args()
    growth = growth_of(SUITE, CONTEXT)
    catalogue = growth.context.catalogue()
    costs = catalogue.total_costs
    added = sum(int(costs[(*arm.place(catalogue), Blend.named(arm.blend))]) for arm in growth.arms)
    with tempfile.TemporaryDirectory() as spare:
        data = Path(spare) / "splits.npz"
        export_splits(growth.context, data)
        task = {
            "context": growth.label,
            "data": str(data),
            "epochs": DEFAULT_EPISODE_LENGTH,
            "batch": GARDEN_BATCH,
            "batches": GARDEN_BATCHES,
            "hidden": HIDDEN,
            "layers": LAYERS,
            "budget": catalogue.host_params + added,
            "rates": list(RATES),
            "tuning": [TUNING_SEED + number for number in range(options.tuning)],
            "test": [EVALUATION_SEED + number for number in range(options.seeds)],
        }
        order = Path(spare) / "task.json"
        order.write_text(json.dumps(task), encoding="utf-8")
        python = environment(options.venv, options.extra)
        words = [str(python), str(WORKER), str(order), str(options.out)]
        subprocess.run(words, check=True)  # noqa: S603


if __name__ == "__main__":
    main()
