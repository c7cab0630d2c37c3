"""The learner on tasks of others' kind, against sb3-contrib's RecurrentPPO and MaskablePPO.

    python benchmarks/foreign.py --keep runs/foreign --jobs 16 --seconds 570    # again and again
    python benchmarks/foreign.py --keep runs/foreign --report --json foreign.json

Every learner plays with as many environment steps: Esper by `esper.rl.train(..., preset="auto")`,
by which it is judged, and with one change; the peers, of whom the better counts, with their
documented settings, with those of Esper's preset, and with the smaller minibatches that Esper had
before its presets were chosen, which serve some of theirs better. RecurrentPPO plays what needs
memory, MaskablePPO what needs masks or no memory. A run is a file in the folder, so a study can be
split, stopped and gone on with; seed comes after seed, so that what is there is of all tasks, and
with `--seconds` no run is begun that would not be over in time; what has fewer seeds than Esper's
is not reported. Each run has one thread; its processor seconds are those of training, without
evaluation. Returns are greedy, on fresh episodes; sampled ones are noted beside them.

Esper is better or worse than the better peer where the 95 % interval of the difference of returns
leaves out 0. Where every run of both came to the greatest return that the task has, returns cannot
differ: there, and only there, the steps until the bar was first passed decide in the same way, and
the table says so. Network and presets were chosen by nine of the tasks: figures count the verdicts
on those and on the other one apart. Peers need `pip install sb3-contrib`.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product, repeat
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from _report import write_json, write_section
from foreign_tasks import CHOSEN_BY, TASKS, Task
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation
from rich.console import Console
from rich.table import Table

ROUNDING = 1e-5  # of sums of rewards
CHECKS, CHECKED, JUDGED = 16, 8, 32  # looks while training, episodes of a look and of the last one
CONFIGURATIONS = {
    "esper": ("auto", "no-bonus"),
    "recurrent": ("documented", "as-esper", "finer"),
    "maskable": ("documented", "as-esper", "finer"),
}
# Processor seconds of 1,000 steps, about; of what is wanted, the longest runs begin first.
COSTS = {"esper": 0.9, "recurrent": 5.0, "maskable": 1.0}
# 97.5 % points of Student's t, by degrees of freedom from 1 on.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
HEADER = (
    "task",
    "needs",
    "Esper",
    "better peer",
    "difference",
    "seconds: Esper",
    "peers",
    "bar at",
)
VERDICTS = {"worse": -1, "equal": 0, "better": 1}
Result = dict[str, Any]


class Watch:
    """Looks at a learner while it trains; the time of that is taken off."""

    def __init__(self, steps: int, play: Callable[[int, bool], float]) -> None:
        self.every, self.play = steps / CHECKS, play
        self.curve: list[tuple[int, float]] = []
        self.begun, self.apart = time.process_time(), 0.0

    def look(self, taken: int) -> None:
        if taken >= self.every * (len(self.curve) + 1) and len(self.curve) < CHECKS - 1:
            now = time.process_time()
            self.curve.append((taken, self.play(CHECKED, True)))
            self.apart += time.process_time() - now

    def result(self, taken: int) -> Result:
        seconds = time.process_time() - self.begun - self.apart
        last = self.play(JUDGED, True)
        curve = [*self.curve, (taken, last)]
        return {"return": last, "sampled": self.play(JUDGED, False), "seconds": seconds} | {
            "curve": curve,
            "steps": taken,
        }


def play_esper(task: Task, configuration: str, seed: int) -> Result:
    from esper.rl import evaluate, train  # both, so that no import is in what is timed

    def play(episodes: int, greedy: bool) -> float:
        return evaluate(agent, task.make, episodes, greedy=greedy)["episode_return"]

    def told(learning: Any, metrics: Any) -> None:
        nonlocal agent, taken
        agent, taken = learning, int(metrics["steps"])
        watch.look(taken)

    agent, taken, watch = None, 0, Watch(task.steps, play)
    changed = {} if configuration == "auto" else {"entropy_coef": 0.0}
    train(task.make, task.steps, seed=seed, gamma=task.gamma, after_update=told, **changed)
    return watch.result(taken)


def play_peer(task: Task, learner: str, configuration: str, seed: int) -> Result:
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_masked
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    def make() -> Any:
        env = task.make()
        if not isinstance(env.observation_space, spaces.MultiDiscrete):
            return env
        return FlattenObservation(env)  # an LSTM of theirs refuses its size otherwise

    recurrent, masked = learner == "recurrent", learner == "maskable" and task.masked
    settings: dict[str, Any] = {"gamma": task.gamma, "seed": seed, "device": "cpu"}
    envs = 8 if recurrent else 1  # and otherwise their defaults
    if configuration != "documented":
        from esper.simic.gym.training import LONG_HORIZON, PRESETS

        spec = task.make().spec
        horizon = (spec.max_episode_steps if spec else None) or 0
        if not recurrent:
            preset = "reactive"
        else:  # as for preset="auto"
            preset = "long" if horizon > LONG_HORIZON else "memory"
        rollout, ours = PRESETS[preset]
        envs, parts = 16, ours.minibatches
        if configuration == "finer":  # Esper's own until larger minibatches served it better
            rollout, parts = 64 if recurrent else 32, 8
        rate = ours.lr
        settings |= {"n_steps": rollout, "batch_size": envs * rollout // parts}
        settings |= {"n_epochs": ours.epochs, "gae_lambda": ours.gae_lambda}
        settings["learning_rate"] = lambda left: rate * left
        if recurrent:
            settings["policy_kwargs"] = {"lstm_hidden_size": 128}
    kind, policy = (RecurrentPPO, "MlpLstmPolicy") if recurrent else (MaskablePPO, "MlpPolicy")
    model: Any = kind(policy, make_vec_env(make, envs, seed=seed), **settings)

    def play(episodes: int, greedy: bool) -> float:
        fresh = make_vec_env(make, min(episodes, 16), seed=10_000)
        chosen = {"n_eval_episodes": episodes, "deterministic": greedy, "warn": False}
        if recurrent:
            return float(evaluate_policy(model, fresh, **chosen)[0])
        return float(evaluate_masked(model, fresh, use_masking=masked, **chosen)[0])

    class Looking(BaseCallback):  # type: ignore[misc]
        def _on_rollout_start(self) -> None:
            watch.look(self.num_timesteps)

        def _on_step(self) -> bool:
            return True

    watch = Watch(task.steps, play)
    learned = {} if recurrent else {"use_masking": masked}
    model.learn(task.steps, callback=Looking(), **learned)
    return watch.result(model.num_timesteps)


# --- jobs and their report -------------------------------------------------------------------

Job = tuple[str, str, str, int]  # task, learner, configuration, seed


def cost(job: Job) -> float:
    """Processor seconds, about."""
    return TASKS[job[0]].steps / 1000 * COSTS[job[1]]


def carry_out(job: Job, folder: Path, end: float) -> str:
    torch.set_num_threads(1)
    task, learner, configuration, seed = job
    if time.time() + cost(job) > end:
        return f"{' '.join(map(str, job))}: left for another time"
    if learner == "esper":
        found = play_esper(TASKS[task], configuration, seed)
    else:
        found = play_peer(TASKS[task], learner, configuration, seed)
    place = folder / file_of(job)
    place.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
    place.with_suffix(".part").rename(place)
    return f"{' '.join(map(str, job))}: {found['return']:.3f} in {found['seconds']:.0f} s"


def file_of(job: Job) -> str:
    return "-".join(map(str, job)) + ".json"


def read(folder: Path, task: str, learner: str, configuration: str) -> list[Result]:
    places = sorted(folder.glob(f"{task}-{learner}-{configuration}-*.json"))
    return [json.loads(place.read_text(encoding="utf-8")) for place in places]


def interval(values: list[float]) -> float:
    """Half of a 95 % interval of the mean."""
    if len(values) < 2:
        return float("inf")
    point = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    return point * stdev(values) / len(values) ** 0.5


def apart(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Difference of means, and half of its 95 % interval (Welch's, with the fewer's freedom)."""
    point = STUDENT[min(len(ours), len(theirs), len(STUDENT) + 1) - 2]
    half = sum(stdev(each) ** 2 / len(each) for each in (ours, theirs)) ** 0.5
    return fmean(ours) - fmean(theirs), point * half


def learned_at(runs: list[Result], bar: float) -> list[float]:
    """Steps at which a look first saw the bar passed; all the steps where none did."""
    return [next((n for n, seen in run["curve"] if seen >= bar), run["steps"]) for run in runs]


def report(folder: Path) -> tuple[dict[str, float], list[list[str]]]:
    figures: dict[str, float] = {}
    rows = []
    for name, task in TASKS.items():
        seeds = max(2, len(read(folder, name, "esper", "auto")))  # fewer are not whole yet
        found = {
            (learner, configuration): runs
            for learner, configurations in CONFIGURATIONS.items()
            for configuration in configurations
            if len(runs := read(folder, name, learner, configuration)) >= seeds
        }
        for (learner, configuration), runs in found.items():
            before = f"{name}.{learner}.{configuration}"
            returns = [run["return"] for run in runs]
            figures |= {
                f"{before}.return": fmean(returns),
                f"{before}.interval": interval(returns),
                f"{before}.sampled": fmean(run["sampled"] for run in runs),
                f"{before}.seconds": fmean(run["seconds"] for run in runs),
                f"{before}.steps_to_bar": fmean(learned_at(runs, task.bar)),
                f"{before}.seeds": len(runs),
            }
        peers = [key for key in found if key[0] != "esper"]
        if ("esper", "auto") in found and peers:
            rows.append(compared(name, task, found, peers, figures))
    return figures | counted_verdicts(figures), rows


def counted_verdicts(figures: dict[str, float]) -> dict[str, float]:
    """How many there are of each, on tasks that presets were chosen by and on the others."""
    counts = dict.fromkeys(
        (f"{group}.{verdict}" for group in ("chosen_by", "others") for verdict in VERDICTS), 0.0
    )
    for name in TASKS:
        if (found := figures.get(f"{name}.verdict")) is not None:
            verdict = next(word for word, number in VERDICTS.items() if number == found)
            counts[f"{'chosen_by' if name in CHOSEN_BY else 'others'}.{verdict}"] += 1
    return counts


def compared(
    name: str,
    task: Task,
    found: dict[tuple[str, str], list[Result]],
    peers: list[tuple[str, str]],
    figures: dict[str, float],
) -> list[str]:
    """A row of the table: Esper with its defaults against the better of the peers."""
    ours = found["esper", "auto"]

    def rank(peer: tuple[str, str]) -> tuple[float, float]:
        """By return, and among equal ones by how soon the bar was passed."""
        mean = fmean(run["return"] for run in found[peer])
        return round(mean, 4), -fmean(learned_at(found[peer], task.bar))

    best = max(peers, key=rank)
    returns = [[run["return"] for run in runs] for runs in (ours, found[best])]
    bars = [learned_at(runs, task.bar) for runs in (ours, found[best])]
    difference, half = apart(*returns)
    figures |= {f"{name}.difference": difference, f"{name}.difference_interval": half}
    shown = f"{difference:+.3f} ± {half:.3f}"
    by_steps = min(map(min, returns)) > task.most - ROUNDING
    if by_steps:
        difference, half = apart(*reversed(bars))  # fewer are better
        shown = f"none, both at the most; bar {difference:+,.0f} ± {half:,.0f} steps earlier"
    figures[f"{name}.decided_by_steps_to_bar"] = float(by_steps)
    verdict = "better" if difference > half else "worse" if difference < -half else "equal"
    figures[f"{name}.verdict"] = VERDICTS[verdict]
    seconds = fmean(run["seconds"] for run in ours)
    shares = []
    for peer in dict.fromkeys(key[0] for key in peers):
        better = max((key for key in peers if key[0] == peer), key=rank)
        theirs = fmean(run["seconds"] for run in found[better])
        figures[f"{name}.seconds_vs_{peer}"] = seconds / theirs
        shares.append(f"{peer} {theirs:.0f}")
    return [
        name,
        ", ".join(task.needs) or "none of them",
        f"{fmean(returns[0]):.3f} ± {interval(returns[0]):.3f}",
        f"{fmean(returns[1]):.3f} ± {interval(returns[1]):.3f} ({' '.join(best)})",
        f"{shown}: {verdict}",
        f"{seconds:.0f}",
        ", ".join(shares),
        " / ".join(f"{fmean(each):,.0f}" for each in bars),
    ]


def jobs_of(options: argparse.Namespace) -> Iterator[Job]:
    peers = bool(importlib.util.find_spec("sb3_contrib"))
    for seed, task, learner in product(range(options.seeds), options.tasks, options.learners):
        remembers, masked = "memory" in TASKS[task].needs, TASKS[task].masked
        fits = remembers if learner == "recurrent" else masked or not remembers
        if learner == "esper" or (peers and fits):
            for configuration in CONFIGURATIONS[learner]:
                if options.configurations is None or configuration in options.configurations:
                    yield task, learner, configuration, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--keep", type=Path, default=Path("runs/foreign"), help="folder of runs")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--learners", nargs="+", choices=CONFIGURATIONS, default=[*CONFIGURATIONS])
    every = sorted({each for names in CONFIGURATIONS.values() for each in names})
    parser.add_argument("--configurations", nargs="+", choices=every, help="these alone")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--seconds", type=float, default=inf, help="on the clock, for this call")
    parser.add_argument("--report", action="store_true", help="play nothing: report what is there")
    parser.add_argument("--json", type=Path, help="write the figures flat to this file")
    parser.add_argument("--write", action="store_true", help="update docs/performance.md")
    options = parser.parse_args()
    console = Console()
    options.keep.mkdir(parents=True, exist_ok=True)
    if not options.report:
        left = [job for job in jobs_of(options) if not (options.keep / file_of(job)).exists()]
        left.sort(key=lambda job: (job[-1], -cost(job)))  # seed after seed
        console.print(f"{len(left)} runs, about {sum(map(cost, left)):,.0f} processor seconds")
        end = time.time() + options.seconds
        with ProcessPoolExecutor(options.jobs) as pool:
            for line in pool.map(carry_out, left, repeat(options.keep), repeat(end)):
                console.print(line)
    figures, rows = report(options.keep)
    table = Table(*HEADER, title="the learner on tasks of others' kind")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    write_json(options.json, figures)
    if options.write:
        command = "python benchmarks/foreign.py --keep runs/foreign --jobs 2 --write"
        write_section("foreign", "cpu", command, HEADER, rows)


if __name__ == "__main__":
    main()
