"""The study of growth, very small: what it trains, how it chooses, how it goes on."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from esper.garden import EVALUATION_SEED, Case, Episodes, find_suite
from esper.garden.atlas import FIRST_ATLAS_SEED
from esper.garden.cases import SELECTION_SEED
from esper.leyline import AgreementError, DataError, UnknownNameError
from esper.leyline.constants import SCORED_EPOCHS
from esper.simic.training.run_processes import init_distributed
from esper.tamiyo.controllers import Arm
from studies.cubes import Results, read_results
from studies.fixed import FixedRun, Start, train_fixed
from studies.folders import DESCRIPTION, RESULTS
from studies.growth_pays import (
    NAMES,
    SIZES,
    TUNING,
    TUNING_SEED,
    C1Size,
    Growth,
    run_c1,
    study_growth,
)
from tests.ranks import torchrun

CONTEXT = find_suite("garden_mlp").find("mnist1d-4000")
ARM = Arm(slot="early", blueprint="convpool", epoch=3)
GROWTH = Growth(label="mlp/glyphs", context=CONTEXT, arms=(ARM,), constant=(ARM,))
BATCHES = 10  # of an epoch
PLAN = C1Size(contexts=(), tuning_seeds=1, test_seeds=2, rows=64, rates=(3e-3, 1e-2), horizon=9)


@contextmanager
def short_epochs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for place in ("esper.garden.episodes", "studies.growth_pays"):
            patch.setattr(f"{place}.GARDEN_BATCHES", BATCHES)
        yield


@pytest.fixture(autouse=True)
def _short_epochs() -> Iterator[None]:
    with short_epochs():
        yield


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c1")
    with short_epochs():
        assert study_growth(folder, [GROWTH], PLAN)
    return folder


def test_every_way_is_trained_on_the_same_seeds_and_described(study: Path) -> None:
    results = Results(read_results(study / RESULTS))
    results.require_paired(NAMES, [GROWTH.label])
    assert results.cube(["grown"], [GROWTH.label], lambda r: r.test).shape == (1, 1, 2)
    about = json.loads((study / DESCRIPTION).read_text(encoding="utf-8"))
    chosen = about["contexts"][GROWTH.label]["chosen"]
    assert set(chosen) == {
        "grown", "small", "small_flops", "scratch_plain", "scratch", "scratch_flops",
    }  # fmt: skip
    assert chosen["scratch_plain"]["rate"] == 3e-3
    assert all(each["rate"] in PLAN.rates for each in chosen.values())
    assert about["contexts"][GROWTH.label]["host_parameters"] == 1098


def test_the_small_host_is_its_own_control_and_growing_adds_what_scratch_has(study: Path) -> None:
    found = {each.controller: each for each in read_results(study / RESULTS)}
    assert found["never"].test == pytest.approx(found["never"].control, abs=0.3)
    assert found["never"].added == found["small"].added == found["small_flops"].added == 0
    assert found["scratch"].added == found["grown"].added == 776
    assert found["scratch"].exposure > found["grown"].exposure > 0


def test_equal_flops_are_equal_to_the_nearest_epoch(study: Path) -> None:
    found = {each.controller: each for each in read_results(study / RESULTS)}
    episodes = Episodes([CONTEXT], 1)
    epoch = float(episodes.training_flops()) / episodes.population.feed.batches * BATCHES
    assert abs(found["small_flops"].flops - found["grown_tuned"].flops) <= epoch / 2
    whole = found["scratch"].flops / PLAN.horizon
    assert abs(found["scratch_flops"].flops - found["grown_tuned"].flops) <= whole / 2
    assert found["small"].flops < found["grown"].flops < found["scratch"].flops


def test_settings_are_chosen_by_validation_on_seeds_that_are_not_reported(study: Path) -> None:
    tuning = read_results(study / TUNING)
    about = json.loads((study / DESCRIPTION).read_text(encoding="utf-8"))
    for name in ("small", "scratch", "grown"):
        tried = [each for each in tuning if each.controller == name]
        best = max(tried, key=lambda each: each.validation)
        assert f"rate={about['contexts'][GROWTH.label]['chosen'][name]['rate']:g} " in best.made
    assert {each.seed for each in tuning} == {TUNING_SEED}
    assert {each.seed for each in read_results(study / RESULTS)} == {
        EVALUATION_SEED, EVALUATION_SEED + 1,
    }  # fmt: skip
    firsts = sorted({TUNING_SEED, EVALUATION_SEED, FIRST_ATLAS_SEED, SELECTION_SEED})
    apart = [later - earlier for earlier, later in pairwise(firsts)]
    assert len(firsts) == 4
    assert min(apart) > 1000


def go_on() -> None:
    """The study in the present folder, by all processes that were launched."""
    with short_epochs(), init_distributed("cpu") as processes:
        assert study_growth(Path(), [GROWTH], PLAN, ranks=processes)


@pytest.mark.nightly
def test_two_ranks_leave_what_one_does_to_the_byte(study: Path, tmp_path: Path) -> None:
    done = torchrun(2, f"{__name__}:go_on", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in (TUNING, RESULTS, DESCRIPTION):
        assert (tmp_path / name).read_bytes() == (study / name).read_bytes(), name


def test_a_finished_study_trains_nothing_again(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in study.iterdir()}

    def refuse(*given: object, **settings: object) -> None:
        pytest.fail("something is trained")

    monkeypatch.setattr("esper.garden.playing.Episodes", refuse)
    monkeypatch.setattr("studies.fixed.Episodes", refuse)
    assert study_growth(study, [GROWTH], PLAN)
    assert {path.name: path.read_bytes() for path in study.iterdir()} == before


def test_a_study_that_was_cut_off_goes_on_and_says_when_it_is_not_finished(
    study: Path, tmp_path: Path
) -> None:
    assert not study_growth(tmp_path, [GROWTH], PLAN, seconds=1e-6)
    assert not (tmp_path / DESCRIPTION).exists()
    begun = read_results(tmp_path / TUNING)
    assert 0 < len(begun) < len(read_results(study / TUNING))
    with (tmp_path / TUNING).open("a", encoding="utf-8") as stream:
        stream.write('{"controller": "gro')  # killed while it wrote
    told: list[tuple[str, int, int]] = []
    assert study_growth(tmp_path, [GROWTH], PLAN, tell=lambda *line: told.append(line))
    assert told[-1] == ("final trainings", len(NAMES) * 2, len(NAMES) * 2)
    ours, theirs = (
        {each.identity: each for each in read_results(folder / RESULTS)}
        for folder in (tmp_path, study)
    )
    assert set(ours) == set(theirs)
    for identity, each in ours.items():
        assert each.test == pytest.approx(theirs[identity].test, abs=0.5)
        assert each.flops == theirs[identity].flops


def test_another_size_in_the_same_folder_is_refused(study: Path) -> None:
    with pytest.raises(DataError, match="another evaluation"):
        study_growth(study, [GROWTH], PLAN, size="cpu")
    with pytest.raises(UnknownNameError, match="size of a study"):
        run_c1(study, "enormous")


def test_one_training_with_two_marks_is_two_trainings() -> None:
    case = Case(CONTEXT, 5)
    runs = [
        FixedRun(case, 3e-3, (4, 6)),
        FixedRun(case, 3e-3, (4,)),
        FixedRun(case, 1e-2, (4,)),
        FixedRun(case, 3e-3, (4,), (ARM,), Start.ZERO),
    ]
    ((first, short, fast, grown),) = [
        [marks for _, marks in sorted(batch, key=lambda pair: runs.index(pair[0]))]
        for batch in train_fixed(runs)
    ]
    assert first[0] == pytest.approx(short[0])
    assert first[1].epochs == 6
    assert first[1].flops == pytest.approx(1.5 * first[0].flops)
    assert fast[0].validation != short[0].validation, "rates are the rows' own"
    assert grown[0].added == 776
    assert grown[0].flops > short[0].flops


def test_a_mark_before_the_scored_epochs_are_over_is_refused() -> None:
    with pytest.raises(AgreementError, match="last epochs"):
        FixedRun(Case(CONTEXT, 0), 3e-3, (SCORED_EPOCHS - 1,))


def test_sizes_keep_the_protocol() -> None:
    for size in SIZES.values():
        assert len(size.rates) >= 4
        assert len({suite for suite, _ in size.contexts}) == 2
    assert SIZES["gpu"].test_seeds >= 16
    assert torch.tensor(SIZES["cpu"].rates).diff().gt(0).all()


def test_short_trainings_do_not_wait_for_long_ones() -> None:
    runs = [FixedRun(Case(CONTEXT, seed), 3e-3, (mark,)) for seed, mark in enumerate((9, 3, 4, 3))]
    batches = [[run.marks for run, _ in batch] for batch in train_fixed(runs, rows=2)]
    assert batches == [[(3,), (3,)], [(4,)], [(9,)]]
