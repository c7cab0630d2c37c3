"""Does growth pay? A network that grew, against everything that could have been done instead.

What grows, where and when is fixed before: in each context the best schedule of the shipped atlas,
which was searched on other random seeds than are reported here. Opponents may choose their learning
rate, from-scratch ones also how the seeds start, by validation scores on seeds of their own. The
grown network is reported as it is and tuned in the same way: its rate, and whether it is planted
when the schedule says or as early as is allowed.

Equal FLOPs are those of the tuned grown network's whole training, to the nearest epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from esper.distributed import SINGLE_PROCESS
from esper.garden import Context, Controls, Result, ResultFile, find_suite, shipped_atlas
from esper.garden.cases import EVALUATION_SEED, Case
from esper.garden.dealing import Ranks
from esper.garden.episodes import EPOCHS_ALONE, Episodes
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, SCORED_EPOCHS
from esper.leyline.errors import DataError, UnknownNameError
from esper.tamiyo.controllers.schedules import Schedule
from esper.tolaria.flops import STEP
from esper.tolaria.population_config import PopulationConfig
from esper.tolaria.tasks import GARDEN_BATCH, GARDEN_BATCHES, GARDEN_RATE
from studies.fixed import Start
from studies.folders import DESCRIPTION, RESULTS, Clock, StudyFolder, Tell
from studies.trials import FIXED, GROW, RANDOM, Setting, Trial, Workshop

TUNING = "tuning.jsonl"
TUNING_SEED = 700_000  # neither the atlas's nor those that are reported
RATES = (1e-3, GARDEN_RATE, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2)

# Names of what is compared, in the order of the tables.
NEVER = "never"  # the small host at the garden's rate
SMALL = "small"  # with a rate of its own
SMALL_FLOPS = "small_flops"
GROWN = "grown"
GROWN_TUNED = "grown_tuned"
CONSTANT = "constant"  # grown by the schedule that is best over the whole suite
RANDOM_GROWTH = "random"
SCRATCH = "scratch"
SCRATCH_PLAIN = "scratch_plain"  # at the garden's rate, to show what the rate is worth
SCRATCH_FLOPS = "scratch_flops"
NAMES = (
    GROWN, GROWN_TUNED, NEVER, SMALL, SCRATCH_PLAIN, SCRATCH, SMALL_FLOPS, SCRATCH_FLOPS, CONSTANT,
    RANDOM_GROWTH,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class C1Size:
    """How much is measured."""

    contexts: tuple[tuple[str, str], ...]  # suite and name
    tuning_seeds: int
    test_seeds: int
    rows: int  # networks that train together
    rates: tuple[float, ...] = RATES
    horizon: int = DEFAULT_EPISODE_LENGTH


_TWO = (("garden_mlp", "mnist1d-4000"), ("garden", "mnist1d-4000"))
_FIVE = (*_TWO, ("garden_mlp", "gain-2.0"), ("garden", "gain-3.0"), ("garden", "xor-0.2"))
_EIGHT = (
    *_FIVE, ("garden_mlp", "mnist1d-1000"), ("garden", "mnist1d-1000"), ("garden", "gain-1.0"),
)  # fmt: skip

SIZES = {
    "quick": C1Size(contexts=_TWO, tuning_seeds=2, test_seeds=4, rows=32),
    "cpu": C1Size(contexts=_FIVE, tuning_seeds=4, test_seeds=16, rows=64),
    "gpu": C1Size(contexts=_EIGHT, tuning_seeds=16, test_seeds=64, rows=2048),
}


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One context, and what is grown in it."""

    label: str  # host and context
    context: Context
    arms: Schedule  # the best known here
    constant: Schedule  # the best known over all contexts of the suite


def growth_of(suite_name: str, context_name: str) -> Growth:
    """What the atlas says should be grown in a context."""
    suite = find_suite(suite_name)
    context = suite.find(context_name)
    atlas = shipped_atlas(suite)
    if atlas is None:
        raise DataError(f"Nothing is known of what grows well in suite {suite_name!r}")
    known = zip(atlas.contexts, atlas.schedules(), strict=True)
    arms = next(plan for each, plan in known if each.key == context.key)
    if not arms:
        raise DataError(
            f"In context {context_name!r} waiting is best, so there is no growth to study",
            fix="choose a context in which something grows: esper atlas --show",
        )
    return Growth(
        label=f"{context.host}/{context.name}",
        context=context,
        arms=arms,
        constant=atlas.constant(),
    )


def run_c1(
    folder: Path,
    size: str,
    device: str = "cpu",
    *,
    tell: Tell = lambda what, done, total: None,
    seconds: float | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> bool:
    """Run the study, or go on with it; False if the time was over before it was finished.

    `ranks` that all call it share the work; the first of them writes.
    """
    if size not in SIZES:
        raise UnknownNameError.of("size of a study", size, SIZES)
    growths = [growth_of(*pair) for pair in SIZES[size].contexts]
    how: dict[str, Any] = {"tell": tell, "seconds": seconds, "ranks": ranks}
    return study_growth(folder, growths, SIZES[size], device, size=size, **how)


def study_growth(
    folder: Path,
    growths: Sequence[Growth],
    plan: C1Size,
    device: str = "cpu",
    *,
    size: str = "own",
    tell: Tell = lambda what, done, total: None,
    seconds: float | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> bool:
    """The study over these growths; see `run_c1`."""
    config = PopulationConfig(rate=GARDEN_RATE, deterministic=True)
    workshop = Workshop(
        rows=plan.rows,
        device=device,
        config=config,
        horizon=plan.horizon,
        controls=Controls(horizon=plan.horizon, device=device, config=config),
        clock=Clock(seconds),
        tell=tell,
        ranks=ranks,
    )
    rules = {
        "study": "c1",
        "size": size,
        "horizon": plan.horizon,
        "epoch": f"{GARDEN_BATCHES} x {GARDEN_BATCH}",
        "alone": EPOCHS_ALONE,
    }
    kept = StudyFolder(folder, ranks)
    with kept.locked():
        chosen = _measured(folder, growths, plan, workshop, rules)
        if chosen is None:
            return False
        kept.write(DESCRIPTION, _description(size, plan, growths, chosen))
    return True


def _measured(
    folder: Path,
    growths: Sequence[Growth],
    plan: C1Size,
    workshop: Workshop,
    rules: dict[str, Any],
) -> dict[str, dict[str, Setting]] | None:
    """Everything that is trained, into the folder; returns what was chosen in each context.

    None if the time was over before.
    """
    tuning = ResultFile(folder / TUNING, rules, workshop.ranks)
    grown = [trial for growth in growths for trial in _grown_trials(growth, plan)]
    if not workshop.run("tuning what grows", grown, tuning):
        return None
    lengths = {growth.label: _equal_epochs(growth, tuning.results, grown) for growth in growths}
    fixed = [
        trial for growth in growths for trial in _fixed_trials(growth, plan, lengths[growth.label])
    ]
    if not workshop.run("tuning opponents", fixed, tuning):
        return None
    chosen = {growth.label: _choose(growth, tuning.results, [*grown, *fixed]) for growth in growths}
    trials = [
        trial for growth in growths for trial in _test_trials(growth, plan, chosen[growth.label])
    ]
    file = ResultFile(folder / RESULTS, rules, workshop.ranks)
    return chosen if workshop.run("final trainings", trials, file, last=True) else None


def _cases(growth: Growth, first: int, count: int) -> list[Case]:
    return [Case(growth.context, first + number) for number in range(count)]


def _trials(
    growth: Growth, cases: Sequence[Case], settings: Sequence[tuple[str, Setting]]
) -> list[Trial]:
    return [Trial(name, growth.label, case, each) for case in cases for name, each in settings]


def _grown_trials(growth: Growth, plan: C1Size) -> list[Trial]:
    cases = _cases(growth, TUNING_SEED, plan.tuning_seeds)
    early = tuple(replace(arm, epoch=min(arm.epoch, EPOCHS_ALONE)) for arm in growth.arms)
    settings = [
        (GROWN, Setting(way=GROW, epochs=plan.horizon, rate=rate, arms=arms))
        for arms in dict.fromkeys([growth.arms, early])
        for rate in plan.rates
    ]
    return _trials(growth, cases, settings)


def _equal_epochs(
    growth: Growth, results: Sequence[Result], trials: Sequence[Trial]
) -> dict[str, int]:
    """Epochs in which small host and final architecture spend what the grown network spent."""
    made = str(_choose(growth, results, trials)[GROWN])
    spent = [r.flops for r in results if (r.context, r.made) == (growth.label, made)]
    episodes = Episodes([growth.context], 1)
    table, catalogue = episodes.flops, episodes.population.catalogue
    whole = table.host
    for arm in growth.arms:
        slot, blueprint = arm.place(catalogue)
        whole += int(table.seeds[slot, blueprint])
        whole += int(table.gates[slot]) if arm.blend == "gate" else 0
    samples = GARDEN_BATCH * GARDEN_BATCHES
    mean = sum(spent) / len(spent)
    return {
        name: max(SCORED_EPOCHS, round(mean / (STEP * each * samples)))
        for name, each in ((SMALL_FLOPS, table.host), (SCRATCH_FLOPS, whole))
    }


def _fixed_trials(growth: Growth, plan: C1Size, lengths: dict[str, int]) -> list[Trial]:
    cases = _cases(growth, TUNING_SEED, plan.tuning_seeds)
    settings = []
    for start in Start:
        setting = Setting(epochs=plan.horizon, rate=GARDEN_RATE, arms=growth.arms, start=start)
        settings.append((SCRATCH_PLAIN, setting))
    for rate in plan.rates:
        for name, epochs in ((SMALL, plan.horizon), (SMALL_FLOPS, lengths[SMALL_FLOPS])):
            settings.append((name, Setting(epochs=epochs, rate=rate)))
        for name, epochs in ((SCRATCH, plan.horizon), (SCRATCH_FLOPS, lengths[SCRATCH_FLOPS])):
            for start in Start:
                setting = Setting(epochs=epochs, rate=rate, arms=growth.arms, start=start)
                settings.append((name, setting))
    return _trials(growth, cases, settings)


def _choose(
    growth: Growth, results: Sequence[Result], trials: Sequence[Trial]
) -> dict[str, Setting]:
    """By name, the setting with the best mean validation score."""
    scores: dict[tuple[str, str], list[float]] = {}
    for result in results:
        if result.context == growth.label:
            scores.setdefault((result.controller, result.made), []).append(result.validation)
    best: dict[str, tuple[float, Setting]] = {}
    for trial in trials:
        if trial.label == growth.label:
            found = scores[trial.name, str(trial.setting)]
            mean = sum(found) / len(found)
            if trial.name not in best or mean > best[trial.name][0]:
                best[trial.name] = mean, trial.setting
    return {name: setting for name, (_, setting) in best.items()}


def _test_trials(growth: Growth, plan: C1Size, chosen: dict[str, Setting]) -> list[Trial]:
    cases = _cases(growth, EVALUATION_SEED, plan.test_seeds)
    plain = Setting(epochs=plan.horizon, rate=GARDEN_RATE)
    settings = {
        GROWN: replace(plain, way=GROW, arms=growth.arms),
        GROWN_TUNED: chosen[GROWN],
        NEVER: plain,
        CONSTANT: replace(plain, way=GROW, arms=growth.constant),
        RANDOM_GROWTH: replace(plain, way=RANDOM),
        **{name: chosen[name] for name in _CHOSEN},
    }
    return _trials(growth, cases, [(name, settings[name]) for name in NAMES])


_CHOSEN = (SMALL, SCRATCH_PLAIN, SCRATCH, SMALL_FLOPS, SCRATCH_FLOPS)


def _description(
    size: str,
    plan: C1Size,
    growths: Sequence[Growth],
    chosen: dict[str, dict[str, Setting]],
) -> dict[str, Any]:
    edges = (min(plan.rates), max(plan.rates))
    return {
        "study": "c1",
        "size": size,
        "horizon": plan.horizon,
        "rate": GARDEN_RATE,
        "rates": list(plan.rates),
        "tuning_seeds": plan.tuning_seeds,
        "test_seeds": plan.test_seeds,
        "contexts": {
            growth.label: {
                "what": str(growth.context),
                "host_parameters": growth.context.catalogue().host_params,
                "arms": [str(arm) for arm in growth.arms],
                "constant": [str(arm) for arm in growth.constant],
                "chosen": {
                    name: {
                        "rate": setting.rate,
                        "arms": [str(arm) for arm in setting.arms],
                        "epochs": setting.epochs,
                        "start": str(setting.start) if setting.way == FIXED else None,
                        "edge": name != SCRATCH_PLAIN and setting.rate in edges,
                    }
                    for name, setting in chosen[growth.label].items()
                },
            }
            for growth in growths
        },
    }
