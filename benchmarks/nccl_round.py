"""A round of training on one GPU, alone and as the only rank of a group with NCCL.

The group must change nothing but time: weights after the same rounds are compared, and that sums
of tensors on the GPU go through NCCL. Ends with an error if one of them is not so.

    python benchmarks/nccl_round.py [--json FILE] [--envs 256] [--rounds 5]
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import scaling
import torch
from _report import write_json
from safetensors.torch import load_file, save_file
from torch import distributed

from esper.simic.training import RunFolder, Trainer
from esper.simic.training.run_processes import init_distributed, launch


def settings(envs: int) -> Any:
    return replace(scaling.settings(envs), device="cuda", deterministic=True)


def play(folder: Path, rounds: int, *, name: str = "group") -> int:
    """Rounds of a run, in whatever group this process was started in."""
    with init_distributed("cuda") as processes:
        figures: dict[str, float] = {"ranks": processes.size}
        if processes.group is not None:
            figures["nccl"] = float("nccl" in str(distributed.get_backend_config()))
            summed = processes.sum_(torch.ones(4, device="cuda"))
            figures["sum"] = float(summed.sum())
        with Trainer(RunFolder.open(folder), processes=processes) as trainer:
            trainer.begin()
            trainer._run_round()  # programs are built
            seconds = []
            for _ in range(rounds):
                torch.cuda.synchronize()
                began = time.perf_counter()
                trainer._run_round()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            weights = trainer.agent.network.state_dict()
        figures["round"] = sorted(seconds)[rounds // 2]
        (folder / f"{name}.json").write_text(json.dumps(figures), encoding="utf-8")
        held = {key: each.cpu().contiguous() for key, each in weights.items()}
        save_file(held, folder / f"{name}.safetensors")
    return 0


def measured(name: str, envs: int, rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as home:
        run = RunFolder.create(Path(home) / "run", settings(envs), {})
        if name == "group":
            launch(play, run.path, rounds, size=1)
        else:
            play(run.path, rounds, name=name)
        figures = json.loads((run.path / f"{name}.json").read_text(encoding="utf-8"))
        return figures, load_file(run.path / f"{name}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here, so there is nothing to measure.")
        return
    group, after = measured("group", options.envs, options.rounds)
    alone, expected = measured("alone", options.envs, options.rounds)
    apart = max(
        float((after[name].double() - each.double()).abs().max())
        for name, each in expected.items()
        if each.numel()
    )
    figures = {f"alone.{name}": value for name, value in alone.items()}
    figures |= {f"group.{name}": value for name, value in group.items()}
    figures |= {"group_over_alone": group["round"] / alone["round"], "weights_apart": apart}
    for name, value in figures.items():
        print(f"{name:24} {value:.6g}")
    if not (group["nccl"] and group["sum"] == 4.0 and apart <= 1e-6):
        raise SystemExit("the group with NCCL is not what one process is")
    if options.json is not None:
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
