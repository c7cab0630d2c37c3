"""Where a round of training goes, and how many episodes a minute the whole loop plays.

The alternative, measured in the same run, is the engine alone: the same host epochs of the same
population without decisions, validation, rewards, telemetry or learning. What is measured of hosts
after each epoch (validation, leave-one-out, flow) is counted apart.

    python benchmarks/training.py [--device cuda] [--suite garden] [--sizes 16 64 256]
        [--backend fused]

With `--suite greenhouse` drawn hosts of many shapes play side by side, shadows train beside them
and every case has its control in the round: there is no one engine to compare that with, so only
what the whole loop plays is told.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from _report import write_json, write_section

from esper.garden.suites import GREENHOUSE
from esper.leyline.constants import BACKENDS
from esper.simic.training import PRESETS, EvaluationConfig, RunFolder, Trainer
from esper.simic.training.trainer import trainer_class

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
GREENHOUSE_HEADER = ("N", "episodes/min, controls among them", "decide", "learn")
SIZES = {"cpu": (16, 64, 256), "cuda": (1024, 4096, 8192)}


@contextmanager
def opened(suite: str, device: str, backend: str, envs: int) -> Iterator[Trainer]:
    """A trainer that has begun, of a run that nothing else is asked of."""
    config = replace(
        PRESETS[GREENHOUSE if suite == GREENHOUSE else "garden"],
        suite=suite,
        envs=envs,
        device=device,
        backend=backend,
        processes=1,
        rounds=10**6,
        seeds_per_context=1,
        checkpoint_every=10**6,
        evaluation=EvaluationConfig(every=10**6, seeds=1, baselines=()),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run", config, {})
        trainer = trainer_class(run)(run)
        try:
            trainer.begin()
            yield trainer
        finally:
            trainer.close()


def measure(device: str, suite: str, backend: str, envs: int, rounds: int) -> dict[str, float]:
    """Figures of one size."""
    with opened(suite, device, backend, envs) as trainer:
        population, horizon = trainer.garden.population, trainer.config.horizon
        spent = {"host": 0.0, "measuring": 0.0}
        for owner, name in _bookkeeping(trainer):
            spent[name] = 0.0
            setattr(owner, name, _timed(getattr(owner, name), "cpu", spent, name))
        for name in ("train_epoch", "evaluate", "counterfactual", "flow"):
            kind = "host" if name == "train_epoch" else "measuring"
            timed = _timed(getattr(population, name), device, spent, kind)
            setattr(population, name, timed)
        trainer._run_round()  # set-up: programs are compiled, graphs captured, pools grow
        spent |= dict.fromkeys(spent, 0.0)
        whole, phases = _played(trainer, device, rounds)
    steps = rounds * envs * horizon
    return {
        "steps_per_s": steps / whole,
        "episodes_per_minute": 60 * rounds * envs / whole,
        "loop_vs_engine": spent["host"] / whole,
        "measuring_share": spent["measuring"] / whole,
        "decide_share": phases["decide"] / whole,
        "learn_share": phases["learn"] / whole,
        "telemetry_share": phases["report"] / whole,
        **{f"{name}_ms_a_step": 1e3 * s / rounds / horizon for name, s in spent.items()},
    }


def measure_greenhouse(device: str, envs: int, rounds: int) -> dict[str, float]:
    """The same where every round has other hosts. Programs of the first rounds' hosts are compiled
    before; those of hosts that come later are part of what is measured."""
    with opened(GREENHOUSE, device, "auto", envs) as trainer:
        _played(trainer, device, rounds)
        whole, phases = _played(trainer, device, rounds)
        players = trainer.config.rollouts_per_case
    return {
        "episodes_per_minute": 60 * rounds * (envs + envs // players) / whole,
        "decide_share": phases["decide"] / whole,
        "learn_share": phases["learn"] / whole,
    }


def _played(trainer: Trainer, device: str, rounds: int) -> tuple[float, dict[str, float]]:
    """Seconds of so many rounds, in all and by what they were spent on."""
    _settle(device)
    began = time.perf_counter()
    phases: dict[str, float] = {}
    for _ in range(rounds):
        for name, seconds in trainer._run_round().seconds.items():
            phases[name] = phases.get(name, 0.0) + seconds
    _settle(device)
    return time.perf_counter() - began, phases


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
        (trainer.reporter, "_emit_step"),
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


def _row(envs: int, found: dict[str, float]) -> list[str]:
    return [
        f"{envs:,}",
        *(f"{found[name]:,.0f}" for name in ("steps_per_s", "episodes_per_minute")),
        *(f"{found[name]:.0%}" for name in ("loop_vs_engine", "measuring_share")),
        *(f"{found[f'{name}_share']:.1%}" for name in ("decide", "learn", "telemetry")),
    ]


def _greenhouse_row(envs: int, found: dict[str, float]) -> list[str]:
    shares = (f"{found[f'{name}_share']:.1%}" for name in ("decide", "learn"))
    return [f"{envs:,}", f"{found['episodes_per_minute']:,.0f}", *shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--suite", default="garden")
    parser.add_argument("--backend", default="auto", choices=BACKENDS)
    parser.add_argument("--sizes", type=int, nargs="+", help="environments")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device, drawn = options.device, options.suite == GREENHOUSE
    if drawn and options.backend != "auto":
        parser.error("every host of the greenhouse has the backend that suits it: no --backend")
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    # What differs from the garden as it comes stands in the names of figures and of the section.
    other = [GREENHOUSE] if drawn else [] if options.backend == "auto" else [options.backend]
    figures: dict[str, float] = {}
    rows = []
    for envs in options.sizes or SIZES[device]:
        if drawn:
            found = measure_greenhouse(device, envs, options.rounds)
        else:
            found = measure(device, options.suite, options.backend, envs, options.rounds)
        named = "_".join(("training", device, *other, f"n{envs}"))
        figures |= {f"{named}_{name}": value for name, value in found.items()}
        rows.append((_greenhouse_row if drawn else _row)(envs, found))
        print(" | ".join(rows[-1]), flush=True)
        write_json(options.json, figures)
    if options.write:
        words = [f"--{name} {value}" for name, value in vars(options).items()
                 if name in ("device", "suite", "backend", "rounds")
                 and value != parser.get_default(name)]  # fmt: skip
        words += [f"--sizes {' '.join(map(str, options.sizes))}"] if options.sizes else []
        command = " ".join(("python benchmarks/training.py", *words))
        header = GREENHOUSE_HEADER if drawn else HEADER
        write_section(" ".join(("training", *other)), device, command, header, rows)


if __name__ == "__main__":
    main()
