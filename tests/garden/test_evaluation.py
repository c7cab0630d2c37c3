"""Paired evaluation: the same cases for all, results that survive being cut off."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.garden import EVALUATION_SEED, Controls, Playground, Result, evaluate, standings
from esper.garden.atlas import FIRST_ATLAS_SEED
from esper.garden.cases import SELECTION_SEED
from esper.garden.episodes import EPOCHS_ALONE
from esper.leyline import (
    HEADS,
    AgreementError,
    DataError,
    DuplicateNameError,
    EsperError,
    LifecycleOp,
)
from esper.simic.training.config import MAX_SEEDS_PER_CONTEXT
from esper.tamiyo import FactoredRecurrentActorCritic, FeatureTable
from esper.tamiyo.controllers import (
    Arm,
    Controller,
    FixedSchedule,
    LearnedController,
    NeverGrow,
    RandomLegal,
)
from studies import growth_pays, tuning
from tests.garden.plots import CONTEXTS, DOUBLE, HORIZON
from tests.garden.sides import Side, on_sides

SEEDS = 2
BATCHES = 5  # an epoch: enough for a seed to be worth keeping
ARM = Arm(slot="early", blueprint="convpool", blend="immediate", epoch=EPOCHS_ALONE)


def controllers() -> list[Controller]:
    return [NeverGrow(), RandomLegal(), FixedSchedule(ARM)]


@pytest.fixture(autouse=True)
def _short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", BATCHES)


@pytest.fixture(scope="module")
def controls() -> Controls:
    return Controls(horizon=HORIZON, config=DOUBLE)


def run(controls: Controls, **settings: object) -> list[Result]:
    settings = {"seeds": SEEDS} | settings
    where: Any = {name: settings.pop(name) for name in ("rows", "ranks") if name in settings}
    who = settings.pop("controllers", controllers())
    return evaluate(
        who,  # type: ignore[arg-type]
        CONTEXTS,
        Playground(**where, horizon=HORIZON, config=DOUBLE),
        controls=controls,
        **settings,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def usual(controls: Controls) -> list[Result]:
    """What all controllers get, each test's own settings aside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", BATCHES)
        return run(controls)


def assert_close(ours: list[Result], theirs: list[Result]) -> None:
    assert [each.identity for each in ours] == [each.identity for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.added, mine.seeds, mine.interventions, mine.rolled_back) == (
            other.added, other.seeds, other.interventions, other.rolled_back,
        )  # fmt: skip
        for name in ("test", "control", "validation", "area", "exposure"):
            assert getattr(mine, name) == pytest.approx(getattr(other, name), abs=1e-9)


def test_all_controllers_meet_the_same_cases_with_the_same_controls(usual: list[Result]) -> None:
    results = usual
    names = [controller.name for controller in controllers()]
    assert len(results) == len(names) * len(CONTEXTS) * SEEDS
    by_name = {
        name: [(each.key, each.seed, each.control) for each in results if each.controller == name]
        for name in names
    }
    assert by_name[names[0]] == by_name[names[1]] == by_name[names[2]]
    assert {each.seed for each in results} == set(range(EVALUATION_SEED, EVALUATION_SEED + SEEDS))
    for result in results[: len(CONTEXTS) * SEEDS]:
        assert result.controller == "never"
        assert result.net_gain() == pytest.approx(0.0, abs=1e-9)
        assert (result.added, result.interventions, result.exposure) == (0, 0, 0.0)
    grown = [each for each in results if each.controller == names[2]]
    assert all(each.seeds == 1 and each.added > 0 for each in grown)


def test_rent_is_paid_for_the_share_of_the_episode_in_which_a_seed_exists(
    controls: Controls,
) -> None:
    results = run(controls, controllers=[FixedSchedule(ARM)], seeds=1)
    whole = CONTEXTS[0].catalogue().host_params
    for result in results:
        # It is there in all epochs but those that the host trains alone.
        assert result.exposure == pytest.approx(result.added / whole * (1 - EPOCHS_ALONE / HORIZON))


def test_results_do_not_depend_on_how_many_rows_train_together(
    controls: Controls, usual: list[Result]
) -> None:
    assert_close(run(controls, rows=4), usual)


def test_ranks_share_the_batches_and_all_know_the_results_of_one(tmp_path: Path) -> None:
    file, played = tmp_path / "results", []

    def own(rank: Side) -> list[Result]:
        ground = Controls(horizon=HORIZON, config=DOUBLE)
        batches = []
        found = run(ground, file=file, ranks=rank, progress=lambda *done: batches.append(1), **few)
        played.append(len(batches))
        return found

    few: dict[str, object] = {"rows": 4, "seeds": 1, "controllers": [RandomLegal()]}
    alone = run(Controls(horizon=HORIZON, config=DOUBLE), **few)
    first, second = on_sides(2, own)
    assert first == second == alone
    assert played[0] == played[1]
    assert len(file.read_text(encoding="utf-8").splitlines()) == 1 + len(alone), "one writes"


def test_an_evaluation_that_was_cut_off_goes_on_where_it_was(
    controls: Controls, usual: list[Result], tmp_path: Path
) -> None:
    file = tmp_path / "deep" / "results.jsonl"

    class KilledError(Exception):
        pass

    def kill(what: str, done: int, total: int) -> None:
        if what == "episodes" and done == 12:
            raise KilledError

    with pytest.raises(KilledError):
        run(controls, file=file, rows=4, progress=kill)
    whole = file.read_text()
    kept = whole.splitlines()
    assert len(kept) == 1 + 12
    file.write_text(whole[:-40])  # the last line is torn
    played: list[tuple[str, int]] = []
    results = run(
        controls, file=file, rows=4, progress=lambda what, done, total: played.append((what, total))
    )
    assert len(results) > 12
    assert played[0] == ("episodes", len(results) - 11), "eleven whole lines were kept"
    assert not any(what == "control" for what, _ in played)
    assert_close(results, usual)
    stored = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(stored) == 1 + len(results)
    again: list[str] = []
    run(controls, file=file, progress=lambda what, done, total: again.append(what))
    assert not again, "nothing is left to play"


def test_a_case_keeps_the_control_that_it_was_first_paired_with(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    first = run(Controls(horizon=HORIZON, config=DOUBLE), file=file, controllers=[NeverGrow()])
    header, *lines = file.read_text().splitlines()
    moved = [json.dumps(json.loads(line) | {"control": 12.5}) for line in lines]
    file.write_text("\n".join([header, *moved]) + "\n")
    both = [NeverGrow(), FixedSchedule(ARM)]
    later = run(Controls(horizon=HORIZON, config=DOUBLE), file=file, controllers=both)
    assert len(later) == 2 * len(first)
    assert {result.control for result in later} == {12.5}


def test_a_file_whose_first_line_was_torn_is_begun_anew(controls: Controls, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    run(controls, file=file, controllers=[NeverGrow()])
    whole = file.read_text()
    for torn in ("", whole[:9]):
        file.write_text(torn)
        run(controls, file=file, controllers=[NeverGrow()])
        assert file.read_text() == whole


def test_results_of_other_settings_and_broken_files_are_refused(
    controls: Controls, tmp_path: Path
) -> None:
    file = tmp_path / "results.jsonl"
    run(controls, file=file, controllers=[NeverGrow()])
    with pytest.raises(DataError, match="results of another evaluation"):
        evaluate([NeverGrow()], CONTEXTS, Playground(horizon=HORIZON + 1), seeds=1, file=file)
    single = Playground(horizon=HORIZON)  # float32
    with pytest.raises(DataError, match="results of another evaluation"):
        evaluate([NeverGrow()], CONTEXTS, single, seeds=1, file=file)
    text = file.read_text()
    file.write_text(text.replace('"seed"', '"sed"', 1))
    with pytest.raises(DataError, match=r"Line 2 of .* is not a result"):
        run(controls, file=file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not text"):
        run(controls, file=file)
    with pytest.raises(DataError, match="cannot be kept"):
        run(controls, file=tmp_path)


def test_what_cannot_be_is_refused_before_anything_is_played(controls: Controls) -> None:
    measured = len(controls)
    with pytest.raises(DuplicateNameError, match="different names; given: never, never"):
        run(controls, controllers=[NeverGrow(), NeverGrow()])
    for wrong in ({"seeds": 0}, {"controllers": []}):
        with pytest.raises(AgreementError, match="nothing to evaluate"):
            run(controls, **wrong)
    for arm, said in (
        (Arm(slot="early", blueprint="conv", epoch=1), "Unknown blueprint"),
        (Arm(slot="first", blueprint="mlp", epoch=1), "Unknown slot"),
        (Arm(slot="early", blueprint="mlp", epoch=40), "cannot become permanent"),
    ):
        with pytest.raises(EsperError, match=said):
            run(controls, seeds=9, controllers=[NeverGrow(), FixedSchedule(arm)])
    assert len(controls) == measured


def test_standings_are_those_of_the_results(usual: list[Result]) -> None:
    results = usual
    lines = {line.controller: line for line in standings(results, rent=2.0)}
    assert list(lines) == [controller.name for controller in controllers()]
    for name, line in lines.items():
        own = [each for each in results if each.controller == name]
        gains = torch.tensor([each.net_gain(2.0) for each in own], dtype=torch.float64)
        assert line.gain.value == pytest.approx(float(gains.mean()))
        assert line.harmful == pytest.approx(float((gains < -0.5).double().mean()))
        assert line.episodes == len(own)
        assert line.gain.low <= line.gain.value <= line.gain.high


def test_results_of_another_controller_under_the_same_name_are_not_taken_for_its_own(
    controls: Controls, tmp_path: Path
) -> None:
    catalogue = CONTEXTS[0].catalogue()
    table = FeatureTable.of(catalogue)
    space = HEADS.resolve(catalogue)
    played = []
    for seed in range(2):
        torch.manual_seed(seed)
        network = FactoredRecurrentActorCritic(space, state_dim=table.size, lstm_hidden_dim=8)
        network.bias_action_logit("op", (LifecycleOp.WAIT, LifecycleOp.GERMINATE)[seed], 10.0)
        who = [LearnedController(network)]
        played.append(run(controls, controllers=who, file=tmp_path / "results.jsonl", seeds=1))
    assert played[0][0].made != played[1][0].made
    assert sum(each.interventions for each in played[0]) == 0
    assert sum(each.interventions for each in played[1]) > 0


def test_the_seeds_of_training_atlas_tuning_selection_and_evaluation_are_apart() -> None:
    tuned = [tuning.TUNING_SEED, growth_pays.TUNING_SEED]
    starts = [0, FIRST_ATLAS_SEED, *tuned, SELECTION_SEED, EVALUATION_SEED]
    assert sorted(starts) == starts
    assert min(later - earlier for earlier, later in pairwise(starts)) >= MAX_SEEDS_PER_CONTEXT
