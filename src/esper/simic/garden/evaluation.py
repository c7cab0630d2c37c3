"""Paired evaluation: every controller on the same cases, scored on test data.

Shapes: `N` rows.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, DEFAULT_RENT
from esper.leyline.errors import AgreementError, DuplicateNameError
from esper.simic.garden.controls import Controls
from esper.simic.garden.draws import EVALUATION_SEED
from esper.simic.garden.episodes import Episodes
from esper.simic.garden.playing import Played, play
from esper.simic.garden.results import Result, ResultFile
from esper.simic.statistics import Estimate, interquartile_mean_interval, mean_interval
from esper.tamiyo.controllers import Controller
from esper.tamiyo.controllers.protocol import Checkable
from esper.tolaria.garden.bed import EPOCHS_ALONE, Bed, Case, by_shape, catalogue_of
from esper.tolaria.garden.contexts import Context
from esper.tolaria.settings import PopulationConfig
from esper.tolaria.tasks import GARDEN_BATCH, GARDEN_BATCHES

HARM = 0.5  # points of net gain below the paired control; less is taken for noise

Progress = Callable[[str, int, int], None]  # what is played, episodes done, of how many


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
) -> list[Result]:
    """Play `seeds` cases of every context with every controller.

    With `file` results are kept there and what it already holds is not played again.
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
    _measure_controls(controls, unknown, progress)
    for alike in by_shape(contexts):
        keys = {context.key for context in alike}
        episodes: Episodes | None = None
        for controller in controllers:
            todo = [
                case
                for case in cases
                if case.context.key in keys and sought(controller.name, case) not in done
            ]
            if todo and episodes is None:
                most = min(rows, len([case for case in cases if case.context.key in keys]))
                bed = Bed(alike, most, horizon=horizon, device=device, config=config)
                episodes = Episodes(bed, test=True)
            for first in range(0, len(todo), rows):
                assert episodes is not None
                batch = todo[first : first + len(episodes)]
                played = play(episodes, controller, batch)
                fresh = _results(controller.name, made, batch, played, controls)
                done |= {result.identity: result for result in fresh}
                if stored is not None:
                    stored.add(fresh)
                progress(controller.name, min(first + rows, len(todo)), len(todo))
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
        catalogue = catalogue_of(alike[0], blueprints)
        for controller in controllers:
            if isinstance(controller, Checkable):
                controller.require_possible(catalogue, horizon)


def _measure_controls(controls: Controls, cases: Sequence[Case], progress: Progress) -> None:
    missing = controls.missing(cases)
    measured = 0
    for batch in controls.batches(missing):
        controls.require(batch)
        measured += len(batch)
        progress("control", measured, len(missing))


def _results(
    name: str,
    made: Mapping[str, str],
    cases: Sequence[Case],
    played: Played,
    controls: Controls,
) -> list[Result]:
    columns = zip(
        cases,
        controls.test(cases).tolist(),
        played.test.tolist(),
        played.validation.tolist(),
        played.curve.mean(1).tolist(),
        played.exposure.tolist(),
        played.added.tolist(),
        played.seeds.tolist(),
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
            interventions=interventions,
            rolled_back=rolled_back,
        )
        for (
            case, control, test, validation, area,
            exposure, added, seeds, interventions, rolled_back,
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
