"""What Optuna would have found, replayed against trainings that were kept.

Every candidate was trained to the end once, with its validation score and its FLOPs after every
epoch. So a search can be played as often as one likes without training: a trial that it runs for
some epochs costs their FLOPs and reports those scores.

Shapes: `C` candidates, `E` epochs.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from growing_tasks import Candidate
from numpy.typing import NDArray

SAMPLERS = 20  # searches, each with a seed of its own
RANDOM_TRIALS = 3  # before the sampler begins to model what it saw
FULL_TRIALS = 2  # that are not cut short, so that others have something to be compared with
LEAST_EPOCHS = 3  # before a trial may be cut short


@dataclass(frozen=True)
class Trainings:
    """Of all candidates, on one task and seed."""

    candidates: Sequence[Candidate]
    curves: NDArray[np.float64]  # [C, E] validation score
    flops: NDArray[np.float64]  # [C, E] of every epoch
    tests: NDArray[np.float64]  # [C]


def optuna_here() -> ModuleType | None:
    """The package, where it is installed."""
    try:
        import optuna
    except ImportError:
        return None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def searched(optuna: ModuleType, known: Trainings, budgets: Sequence[float]) -> list[float]:
    """Mean test score of the best finished trial, by validation, within each budget of FLOPs."""
    found = [_one_search(optuna, known, budgets, seed) for seed in range(SAMPLERS)]
    return [float(np.mean(column)) for column in zip(*found, strict=True)]


def _one_search(
    optuna: ModuleType, known: Trainings, budgets: Sequence[float], seed: int
) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(n_startup_trials=RANDOM_TRIALS, seed=seed),
            pruner=optuna.pruners.MedianPruner(FULL_TRIALS, n_warmup_steps=LEAST_EPOCHS),
        )
    finished: list[tuple[float, float, float]] = []  # FLOPs spent until then, validation, test
    spent = 0.0
    while spent < max(budgets):
        trial = study.ask()
        number = _suggested(trial, known.candidates)
        pruned = False
        for epoch, (score, cost) in enumerate(
            zip(known.curves[number], known.flops[number], strict=True)
        ):
            spent += float(cost)
            trial.report(float(score), epoch)
            pruned = epoch + 1 < known.curves.shape[1] and trial.should_prune()
            if pruned:
                break
        last = float(known.curves[number, -1])
        if pruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, last)
            finished.append((spent, last, float(known.tests[number])))
    return [_best_within(finished, budget) for budget in budgets]


def _suggested(trial: object, candidates: Sequence[Candidate]) -> int:
    """A place, and then what to plant there."""
    ask = trial.suggest_categorical  # type: ignore[attr-defined]
    place = ask("place", list(dict.fromkeys(each.place for each in candidates)))
    here = [each.blueprint for each in candidates if each.place == place]
    blueprint = ask(f"blueprint at {place}", here)
    pairs = [(each.place, each.blueprint) for each in candidates]
    return pairs.index((place, blueprint))


def _best_within(finished: Sequence[tuple[float, float, float]], budget: float) -> float:
    """The first trial counts, whatever it cost: a search that trains nothing has no answer."""
    counted = [each for each in finished if each[0] <= budget] or list(finished[:1])
    return max(counted, key=lambda each: each[1])[2]
