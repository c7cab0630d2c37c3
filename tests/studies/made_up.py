"""Made-up results of studies, with figures that can be worked out by hand."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from esper.garden.evaluation import FORMAT, Result
from studies.folders import DESCRIPTION, RESULTS
from studies.growth_pays import GROWN, NAMES

GROUPS = {
    "training": ["plain", "gain", "noise"],
    "task": ["other-task"],
    "host": ["other-host", "wider-host"],
    "lesion": ["hurt"],
}
SCALES = {"plain": 10.0, "gain": 20.0, "noise": 5.0}
# Net gain of each controller, at any rent, in units of the context's scale.
WORTH = {
    "never": 0.0,
    "random": 0.1,
    "best_constant": 0.4,
    "oracle": 0.8,
    "periodic": 0.2,
    "plateau": 0.3,
    "gap": 0.25,
    "race": 0.5,
    "heuristic": 0.35,
    "bandit": 0.45,
    "tamiyo": 0.7,
    "blanked": 0.38,
    "untaught": 0.42,
}
LEARNED = ("tamiyo", "blanked", "untaught")
TRAININGS = 5
EPISODES = 8
SAMPLES = 50_000


def result(controller: str, context: str, seed: int, gain: float, **more: Any) -> Result:
    """An episode with this net gain at every rent: it added nothing for long."""
    record: dict[str, Any] = {
        "controller": controller,
        "made": controller,
        "context": context,
        "key": context,
        "seed": seed,
        "scale": SCALES.get(context, 10.0),
        "test": 50.0 + gain,
        "control": 50.0,
        "validation": 50.0 + gain,
        "area": 40.0 + gain / 2,
        "exposure": 0.0,
        "added": 0 if controller == "never" else 100,
        "seeds": 0 if controller == "never" else 1,
        "flops": SAMPLES * (1000.0 if controller == "never" else 1500.0),
        "interventions": 0,
        "rolled_back": False,
    }
    return Result(**(record | more))


def learning_results(
    worth: Mapping[str, float] = WORTH, *, noise: float = 0.0, episodes: int = EPISODES
) -> list[Result]:
    """Every controller in every context; noise is shared by all controllers of an episode."""
    random = np.random.default_rng(0)
    results = []
    for context in (each for contexts in GROUPS.values() for each in contexts):
        luck = noise * random.standard_normal(episodes)
        for name, value in worth.items():
            learned = name in LEARNED
            for number in range(TRAININGS if learned else 1):
                own = noise * random.standard_normal(episodes)
                for seed in range(episodes):
                    gain = SCALES.get(context, 10.0) * value
                    if name != "never":
                        gain += float(luck[seed] + own[seed])
                    called = f"{name}-{number}" if learned else name
                    results.append(result(called, context, seed, gain))
    return results


def learning_description(worth: Mapping[str, float] = WORTH) -> dict[str, Any]:
    return {
        "groups": GROUPS,
        "best_heuristic": "race",
        "episodes": {f"tamiyo-{number}": 10_000 for number in range(TRAININGS)}
        | {"blanked-0": 5_000, "best_constant": 9_000},
        "specs": {"race": "race:places=early/norm", "best_constant": ["early/conv/gate@4"]},
        "curves": {
            f"{kind}-{number}": [
                [step * 1000, worth[kind] * (1 - 0.8**step) + 0.01 * number] for step in range(11)
            ]
            for kind in LEARNED
            for number in range(TRAININGS)
        },
        "searches": {},
    }


# Test accuracy of each way to train; the same in every seed but for the seed's own luck.
TESTS = {
    "grown": 70.0,
    "grown_tuned": 80.0,
    "never": 50.0,
    "small": 60.0,
    "scratch_plain": 66.0,
    "scratch": 78.0,
    "small_flops": 65.0,
    "scratch_flops": 76.0,
    "constant": 68.0,
    "random": 55.0,
}
CONTEXTS = ("mlp/glyphs", "conv1d/glyphs")


def growth_results(tests: Mapping[str, float] = TESTS, *, seeds: int = 6) -> list[Result]:
    assert set(tests) == set(NAMES)
    random = np.random.default_rng(1)
    results = []
    for context in CONTEXTS:
        luck = random.standard_normal(seeds)
        for name, test in tests.items():
            own = 0.1 * random.standard_normal(seeds)
            for seed in range(seeds):
                score = test + float(luck[seed] + own[seed])
                results.append(
                    result(name, context, seed, score - 50.0, added=300 if GROWN in name else 0)
                )
    return results


def growth_description() -> dict[str, Any]:
    chosen = {"rate": 0.01, "epochs": 25, "start": "usual", "edge": False, "arms": []}
    named = (GROWN, "small", "scratch_plain", "scratch", "small_flops", "scratch_flops")
    return {
        "study": "c1",
        "size": "quick",
        "horizon": 25,
        "rate": 0.003,
        "rates": [0.001, 0.003, 0.01, 0.03],
        "tuning_seeds": 2,
        "test_seeds": 6,
        "contexts": {
            context: {
                "what": context,
                "host_parameters": 1000,
                "arms": ["early/conv/gate@4"],
                "constant": ["early/conv/gate@9"],
                "chosen": {name: chosen | {"edge": name == "small"} for name in named},
            }
            for context in CONTEXTS
        },
    }


PEER = {
    "library": "peer",
    "version": "1.0",
    "context": CONTEXTS[0],
    "epochs": 25,
    "budget": 1300,
    "runs": [
        {"activation": "relu", "phase": phase, "seed": seed, "rate": 0.01, "test": 60.0 + seed,
         "validation": 60.0, "parameters": 1290}
        for phase in ("tuning", "test")
        for seed in range(4)
    ],
}  # fmt: skip


def write_study(folder: Path, results: Sequence[Result], description: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"format": FORMAT}), *(json.dumps(asdict(each)) for each in results)]
    (folder / RESULTS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")
    return folder
