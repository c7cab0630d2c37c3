"""Where a round of training goes, and how many episodes a minute the whole loop plays.

The alternative, measured in the same run, is the engine alone: the same host epochs of the same
population without decisions, validation, rewards, telemetry or learning. What is measured of hosts
after each epoch (validation, leave-one-out, flow) is counted apart.

    python benchmarks/training.py [--device cuda] [--suite garden] [--sizes 16 64 256]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from _report import write_json, write_section

from esper.simic.training import PRESETS, EvaluationConfig, RunFolder, Trainer

HEADER = (
    "N",
    "steps/s",
    "episodes/min",
    "host training",
    "measuring hosts",
    "decide",
    "learn",
    "telemetry",
)
SIZES = {"cpu": (16, 64, 256), "cuda": (1024, 4096, 8192)}


def measure(device: str, suite: str, envs: int, rounds: int) -> dict[str, float]:
    """Figures of one size."""
    config = replace(
        PRESETS["garden"],
        suite=suite,
        envs=envs,
        device=device,
        processes=1,
        rounds=10**6,
        cases=1,
        checkpoint_every=10**6,
        evaluation=EvaluationConfig(every=10**6, seeds=1, baselines=()),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(RunFolder.create(Path(folder) / "run", config, {}))
        try:
            trainer.begin()
            population = trainer.garden.population
            spent = {"host": 0.0, "measuring": 0.0}
            for owner, name in _bookkeeping(trainer):
                spent[name] = 0.0
                setattr(owner, name, _timed(getattr(owner, name), "cpu", spent, name))
            for name in ("train_epoch", "evaluate", "counterfactual", "flow"):
                kind = "host" if name == "train_epoch" else "measuring"
                timed = _timed(getattr(population, name), device, spent, kind)
                setattr(population, name, timed)
            trainer._one_round()  # set-up: programs are compiled, graphs captured, pools grow
            spent |= dict.fromkeys(spent, 0.0)
            _settle(device)
            began = time.perf_counter()
            phases: dict[str, float] = {}
            for _ in range(rounds):
                for name, seconds in trainer._one_round().seconds.items():
                    phases[name] = phases.get(name, 0.0) + seconds
            _settle(device)
            whole = time.perf_counter() - began
        finally:
            trainer.close()
    steps = rounds * envs * config.horizon
    return {
        "steps_per_s": steps / whole,
        "episodes_per_minute": 60 * steps / config.horizon / whole,
        "loop_vs_engine": spent["host"] / whole,
        "measuring_share": spent["measuring"] / whole,
        "decide_share": phases["decide"] / whole,
        "learn_share": phases["learn"] / whole,
        "telemetry_share": phases["tell"] / whole,
        **{f"{name}_ms_a_step": 1e3 * s / rounds / config.horizon for name, s in spent.items()},
    }


def _bookkeeping(trainer: Trainer) -> list[tuple[object, str]]:
    """What else a step consists of: timed as it is, without waiting for the device."""
    garden, agent = trainer.garden, trainer.agent
    population, governor = garden.population, garden.episodes.governor
    return [
        *((agent, name) for name in ("act", "record")),
        *((garden, name) for name in ("legal", "observations", "_reward_state", "_begin")),
        *((governor, name) for name in ("enter_epoch", "leave_epoch", "_beyond", "_loss_limit")),
        *((population, name) for name in ("apply", "pass_time", "_plant", "_score")),
        (garden.episodes, "_remember"),
        (trainer.reporter, "_tell"),
    ]


def _timed(
    call: Callable[..., object], device: str, spent: dict[str, float], kind: str
) -> Callable[..., object]:
    def timed(*given: object, **named: object) -> object:
        _settle(device)
        began = time.perf_counter()
        found = call(*given, **named)
        _settle(device)
        spent[kind] += time.perf_counter() - began
        return found

    return timed


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--suite", default="garden")
    parser.add_argument("--sizes", type=int, nargs="+", help="environments")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    figures: dict[str, float] = {}
    rows = []
    for envs in options.sizes or SIZES[options.device]:
        found = measure(options.device, options.suite, envs, options.rounds)
        figures |= {f"training_{options.device}_n{envs}_{name}": v for name, v in found.items()}
        rows.append(
            [
                f"{envs:,}",
                f"{found['steps_per_s']:,.0f}",
                f"{found['episodes_per_minute']:,.0f}",
                f"{found['loop_vs_engine']:.0%}",
                f"{found['measuring_share']:.0%}",
                f"{found['decide_share']:.1%}",
                f"{found['learn_share']:.1%}",
                f"{found['telemetry_share']:.1%}",
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
        write_json(options.json, figures)
    if options.write:
        command = f"python benchmarks/training.py --device {options.device}"
        write_section("training", options.device, command, HEADER, rows)


if __name__ == "__main__":
    main()
