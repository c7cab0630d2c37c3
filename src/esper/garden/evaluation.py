"""Paired evaluation: every controller on the same cases, scored on test data.

Shapes: `N` rows.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from esper.garden.cases import EVALUATION_SEED, Case
from esper.garden.contexts import Context, by_shape
from esper.garden.episodes import EPOCHS_ALONE, Episodes
from esper.garden.paired_controls import Controls
from esper.garden.playing import Played, play
from esper.garden.results import Result, ResultFile
from esper.garden.statistics import Estimate, interquartile_mean_interval, mean_interval
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, DEFAULT_RENT
from esper.leyline.errors import AgreementError, DuplicateNameError, EsperError
from esper.tamiyo.controllers import Controller, NeverGrow, SideBySide
from esper.tamiyo.controllers.protocol import Checkable
from esper.tolaria.population_config import PopulationConfig
from esper.tolaria.tasks import GARDEN_BATCH, GARDEN_BATCHES

HARM = 0.5  # points of net gain below the paired control; less is taken for noise

CONTROL = NeverGrow()  # plays the controls that are not known yet, beside everything else

Progress = Callable[[str, int, int], None]  # what is played, episodes done, of how many


class EvaluationStoppedError(EsperError):
    """There was more to play when it was told to stop."""


def evaluate(
    controllers: Sequence[Controller],
    contexts: Sequence[Context],
    *,
    seeds: int = 4,
    first_seed: int = EVALUATION_SEED,
    file: Path | None = None,
    controls: Controls | None = None,
    rows: int = 64,
    horizon: int = DEFAULT_EPISODE_LENGTH,
    device: torch.device | str = "cpu",
    config: PopulationConfig | None = None,
    progress: Progress = lambda what, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Result]:
    """Play `seeds` cases of every context with every controller.

    With `file` results are kept there and what it already holds is not played again. `stop` is
    asked after every batch; if it says so before all is played, that is an error, and what was
    played is in the file.
    """
    names = [controller.name for controller in controllers]
    if len(set(names)) != len(names):
        raise DuplicateNameError(
            "Controllers that are compared need different names", given=", ".join(names)
        )
    if not names or not contexts or seeds < 1 or rows < 1:
        raise AgreementError(
            "There is nothing to evaluate",
            given=f"{len(names)} controllers, {len(contexts)} contexts, {seeds} seeds of each, "
            f"{rows} rows",
            valid="at least 1 each",
        )
    _require_possible(controllers, contexts, horizon, config)
    stored = None if file is None else ResultFile(file, _settings(horizon, config))
    done = {} if stored is None else {result.identity: result for result in stored.results}
    cases = [Case(context, first_seed + number) for number in range(seeds) for context in contexts]
    made = {controller.name: fingerprint_of(controller) for controller in controllers}

    def sought(name: str, case: Case) -> tuple[str, str, str, int]:
        return name, made[name], case.context.key, case.seed

    if controls is None:
        controls = Controls(horizon=horizon, device=device, config=config)
    unknown = [case for case in cases if any(sought(name, case) not in done for name in names)]
    # A control that a stored result was paired with stays the control of its case.
    for result in done.values():
        controls.learn_test(result.key, result.seed, result.control)
    missing = controls.missing_tests(unknown)
    for alike in by_shape(contexts):
        keys = {context.key for context in alike}
        # Controls come first, so that whatever is played knows its own when it is over.
        todo: list[tuple[Controller, Case]] = [
            *((CONTROL, case) for case in missing if case.context.key in keys),
            *(
                (controller, case)
                for controller in controllers
                for case in cases
                if case.context.key in keys and sought(controller.name, case) not in done
            ),
        ]
        if not todo:
            continue
        batches = -(-len(todo) // rows)
        even = -(-len(todo) // batches)  # a last batch of few would cost as much as a whole one
        episodes = Episodes(alike, even, horizon=horizon, device=device, config=config, test=True)
        for first in range(0, len(todo), len(episodes)):
            batch = todo[first : first + len(episodes)]
            fresh = _played(episodes, batch, made, controls)
            done |= {result.identity: result for result in fresh}
            if stored is not None:
                stored.add(fresh)
            left = len(todo) - first - len(batch)
            progress("episodes", len(todo) - left, len(todo))
            if left and stop():
                raise EvaluationStoppedError(
                    "An evaluation was told to stop", given=f"{left} episodes left"
                )
    return [
        # The scale is the suite's present one: it is no part of what was played.
        replace(done[sought(name, case)], scale=case.context.scale)
        for name in names
        for case in cases
    ]


def fingerprint_of(controller: Controller) -> str:
    """What tells controllers of one name apart: their own word for it, or else their name."""
    return str(getattr(controller, "fingerprint", controller.name))


def _settings(horizon: int, config: PopulationConfig | None) -> dict[str, Any]:
    """What results depend on beside controller, context and seed: the rules of the world."""
    rules = repr((config or PopulationConfig(), EPOCHS_ALONE, GARDEN_BATCH, GARDEN_BATCHES))
    digest = hashlib.blake2b(rules.encode(), digest_size=6).hexdigest()
    return {"horizon": horizon, "rules": digest}


def _require_possible(
    controllers: Sequence[Controller],
    contexts: Sequence[Context],
    horizon: int,
    config: PopulationConfig | None,
) -> None:
    """Refuse what a host or an episode contradicts before hours have been spent on the others."""
    blueprints = None if config is None else config.blueprints
    for alike in by_shape(contexts):
        catalogue = alike[0].catalogue(blueprints)
        for controller in controllers:
            if isinstance(controller, Checkable):
                controller.require_possible(catalogue, horizon)


def _played(
    episodes: Episodes,
    batch: Sequence[tuple[Controller, Case]],
    made: Mapping[str, str],
    controls: Controls,
) -> list[Result]:
    """The episodes of a batch, which comes controller by controller, all at once."""
    runs = [(key, len(list(run))) for key, run in groupby(batch, key=lambda pair: id(pair[0]))]
    parts = {id(controller): controller for controller, _ in batch}
    together = SideBySide([(parts[key], count) for key, count in runs])
    cases = [case for _, case in batch]
    played = play(episodes, together, cases)
    known = sum(controller is CONTROL for controller, _ in batch)
    controls.learn(cases[:known], played.curve[:known], played.test[:known])
    names = [controller.name for controller, _ in batch[known:]]
    return _results(names, made, cases[known:], played.rows(slice(known, len(cases))), controls)


def _results(
    names: Sequence[str],
    made: Mapping[str, str],
    cases: Sequence[Case],
    played: Played,
    controls: Controls,
) -> list[Result]:
    columns = zip(
        names,
        cases,
        controls.test(cases).tolist(),
        played.test.tolist(),
        played.validation.tolist(),
        played.curve.mean(1).tolist(),
        played.exposure.tolist(),
        played.added.tolist(),
        played.seeds.tolist(),
        played.flops.tolist(),
        played.interventions.tolist(),
        played.rolled_back.tolist(),
        strict=True,
    )
    return [
        Result(
            controller=name,
            made=made[name],
            context=case.context.name,
            key=case.context.key,
            seed=case.seed,
            scale=case.context.scale,
            test=test,
            control=control,
            validation=validation,
            area=area,
            exposure=exposure,
            added=added,
            seeds=seeds,
            flops=flops,
            interventions=interventions,
            rolled_back=rolled_back,
        )
        for (
            name, case, control, test, validation, area,
            exposure, added, seeds, flops, interventions, rolled_back,
        ) in columns
    ]  # fmt: skip


class Standing(NamedTuple):
    """One line of the table: how a controller did over all its cases."""

    controller: str
    score: Estimate  # interquartile mean of net gain / scale
    gain: Estimate  # mean net gain, points
    harmful: float  # share of episodes that ended worse than never grown
    added: float  # mean parameters added
    interventions: float
    rollbacks: int
    episodes: int


def standings(results: Sequence[Result], rent: float = DEFAULT_RENT) -> list[Standing]:
    """Every controller's line, in order of first appearance."""
    lines = []
    for name in dict.fromkeys(result.controller for result in results):
        own = [result for result in results if result.controller == name]
        lines.append(
            Standing(
                controller=name,
                score=interquartile_mean_interval(grid(own, lambda result: result.score(rent))),
                gain=mean_interval(grid(own, lambda result: result.net_gain(rent))),
                harmful=_mean([result.net_gain(rent) < -HARM for result in own]),
                added=_mean([result.added for result in own]),
                interventions=_mean([result.interventions for result in own]),
                rollbacks=sum(result.rolled_back for result in own),
                episodes=len(own),
            )
        )
    return lines


def grid(results: Sequence[Result], value: Callable[[Result], float]) -> list[list[float]]:
    """A value of one controller's results, [contexts][episodes]."""
    by_context: dict[str, list[Result]] = {}
    for result in results:
        by_context.setdefault(result.key, []).append(result)
    return [
        [value(each) for each in sorted(own, key=lambda result: result.seed)]
        for own in by_context.values()
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
