"""Reports of studies: figures against what can be worked out, and words that follow them."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from esper.leyline import DataError, DuplicateNameError, EsperError, UnknownNameError
from studies.report.figures import growth_figures, learning_figures
from studies.report.growth import GrowthStudy
from studies.report.learning import TAMIYO, TRAINING, LearningStudy
from studies.report.verdicts import (
    CONFIRMED,
    CONTRADICTED,
    NOT_MEASURED,
    NOT_SHOWN,
    growth_verdicts,
    learning_verdicts,
)
from studies.report.writing import write_evidence
from tests.studies.made_up import (
    CONTEXTS,
    GROUPS,
    PEER,
    SCALES,
    TESTS,
    TRAININGS,
    WORTH,
    growth_description,
    growth_results,
    learning_description,
    learning_results,
    write_study,
)

MEAN_SCALE = sum(SCALES.values()) / len(SCALES)  # of the contexts that are trained in


def learning_study(**worth: float) -> LearningStudy:
    return LearningStudy(learning_results(WORTH | worth), learning_description())


@pytest.fixture(autouse=True, scope="module")
def _few_resamples() -> Iterator[None]:
    """Intervals are a little rougher; what is tested of them does not depend on that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.statistics.DEFAULT_RESAMPLES", 200)
        yield


@pytest.fixture(scope="module")
def noisy() -> LearningStudy:
    return LearningStudy(learning_results(noise=1.5), learning_description())


# --- does learning pay? -----------------------------------------------------------------------


UNTAUGHT_BUT_ONE = [f"untaught-{number}" for number in range(1, TRAININGS)]


def test_without_noise_every_figure_is_what_was_put_in() -> None:
    figures = learning_figures(learning_study())
    expected = {
        "c2_vs_best_constant": (0.7 - 0.4) * MEAN_SCALE,
        "c2_vs_best_heuristic": (0.7 - 0.5) * MEAN_SCALE,
        "c2_vs_blanked": (0.7 - 0.38) * MEAN_SCALE,
        "c2_vs_bandit": (0.7 - 0.45) * MEAN_SCALE,
        "c2_gap_closed": (0.7 - 0.4) / (0.8 - 0.4),
        "c2_heldout_task_vs_best_constant": 3.0,
        "c2_heldout_host_vs_best_constant": 3.0,
        "c2_heldout_lesion_vs_best_constant": 3.0,
        "c2_tamiyo_score": 0.7,
        "c2_tamiyo_gain": 0.7 * MEAN_SCALE,
        "c2_score_vs_best_constant": 0.3,
    }
    for name, value in expected.items():
        for suffix in ("", "_lo", "_hi"):  # nothing varies, so an interval is a point
            assert figures[name + suffix] == pytest.approx(value), name + suffix
    assert figures["c2_harmful_rate"] == 0.0
    assert figures["c2_trainings"] == TRAININGS
    assert figures["c2_episodes_per_training"] == 10_000
    assert figures["c2_tamiyo_flops"] == 1.5
    assert all(math.isfinite(value) for value in figures.values())


def test_rent_is_paid_by_exposure_and_figures_name_the_rent() -> None:
    results = [
        replace(each, exposure=0.5 if each.controller.startswith(TAMIYO) else 0.0)
        for each in learning_results()
    ]
    figures = learning_figures(LearningStudy(results, learning_description()))
    lead = (0.7 - 0.4) * MEAN_SCALE
    assert figures["c2_vs_best_constant_rent_0"] == pytest.approx(lead)
    assert figures["c2_vs_best_constant"] == pytest.approx(lead - 2 * 0.5)
    assert figures["c2_vs_best_constant_rent_5"] == pytest.approx(lead - 5 * 0.5)


def test_intervals_hold_what_was_put_in_and_one_training_more_or_less_shows(
    noisy: LearningStudy,
) -> None:
    lead = noisy.lead("training", "best_constant")
    assert lead is not None
    assert lead.low < (0.7 - 0.4) * MEAN_SCALE < lead.high
    assert noisy.gains(TAMIYO, GROUPS["host"]).shape == (TRAININGS, 2, 8)
    line = noisy.line(TAMIYO, "training")
    assert line.over_constant is not None
    assert 0.5 < line.over_constant.low <= line.over_constant.high <= 1.0


def test_harm_is_an_episode_clearly_below_never_growing() -> None:
    study = learning_study(tamiyo=-0.07)  # points: -0.7, -1.4 and -0.35, which is within noise
    assert study.harmful(TAMIYO, "training").value == pytest.approx(2 / 3)
    assert learning_figures(study)["c2_harmful_rate"] == pytest.approx(2 / 3)


def states(study: LearningStudy) -> list[str]:
    return [verdict.state for verdict in learning_verdicts(study)]


def test_sentences_confirm_contradict_or_leave_open_as_the_numbers_say() -> None:
    assert set(states(learning_study())) == {CONFIRMED}
    worse = learning_verdicts(learning_study(tamiyo=0.3))
    assert [verdict.state for verdict in worse] == [
        CONFIRMED,  # the number of trainings
        *[CONTRADICTED] * 3,  # constant, rule, gap
        CONFIRMED,  # no harm
        *[CONTRADICTED] * 6,  # held out, blanked, bandit, untaught
    ]
    equal = LearningStudy(
        learning_results(WORTH | {"tamiyo": 0.4}, noise=3.0), learning_description()
    )
    assert learning_verdicts(equal)[1].state == NOT_SHOWN
    assert "10,000 episodes of training against 5,000" in str(worse[8])
    text = str(worse[1])
    assert text.startswith("**Contradicted**: In contexts it was trained in")
    assert f"{(0.3 - 0.4) * MEAN_SCALE:+.2f} points" in text


def test_one_episode_of_each_context_confirms_nothing() -> None:
    study = LearningStudy(learning_results(episodes=1), learning_description())
    verdicts = learning_verdicts(study)
    assert {verdict.state for verdict in verdicts} == {NOT_SHOWN}
    assert all("tells nothing" in verdict.evidence for verdict in verdicts)
    alone = GrowthStudy(growth_results(seeds=1), growth_description())
    assert {verdict.state for verdict in growth_verdicts(alone)} == {NOT_SHOWN}


def test_trainings_of_any_name_are_counted_together() -> None:
    more = [
        replace(each, controller=each.controller.replace("untaught", "apprentice"))
        for each in learning_results()
        if each.controller.startswith("untaught")
    ]
    study = LearningStudy([*learning_results(), *more], learning_description())
    assert study.gains("apprentice", GROUPS["task"]).shape == (TRAININGS, 1, 8)
    assert study.controllers[:2] == ["tamiyo", "apprentice"]
    assert "c2_vs_apprentice_lo" in learning_figures(study)


def test_what_was_not_played_is_not_spoken_of() -> None:
    results = [each for each in learning_results() if each.controller not in ("bandit", "oracle")]
    study = LearningStudy(results, learning_description())
    found = {verdict.claim[:20]: verdict.state for verdict in learning_verdicts(study)}
    assert found["Deciding again and a"] == NOT_MEASURED
    assert found["Tamiyo closes at lea"] == NOT_MEASURED
    figures = learning_figures(study)
    assert "c2_vs_bandit" not in figures
    assert "c2_gap_closed" not in figures


def test_controllers_are_compared_on_the_cases_that_both_played() -> None:
    whole = LearningStudy(learning_results(), learning_description())
    results = [each for each in learning_results() if (each.controller, each.seed) != ("race", 3)]
    study = LearningStudy(results, learning_description())
    cases = {line.controller: line.episodes for line in study.lines("training")}
    assert cases["race"] == cases["tamiyo"] - 1
    assert study.lead("training", "best_constant") == whole.lead("training", "best_constant")
    contexts = study.groups["training"]
    fewer = study.gains("tamiyo", contexts, beside=("race",))
    kept = [place for place in range(cases["tamiyo"]) if place != 3]
    assert fewer == pytest.approx(whole.gains("tamiyo", contexts)[:, :, kept])
    lead = study.lead("training", "race")
    assert lead is not None
    assert lead.value == pytest.approx(fewer.mean() - study.gains("race", contexts).mean())


def test_a_controller_whose_contexts_have_other_cases_is_refused() -> None:
    first, *results = learning_results()
    with pytest.raises(DataError, match="same cases"):
        LearningStudy(results, learning_description()).lines(TRAINING)
    assert first.controller


@pytest.mark.parametrize("missing", ["tamiyo", "best_constant", "race"])
def test_a_study_without_its_main_figures_is_refused(missing: str) -> None:
    results = [each for each in learning_results() if not each.controller.startswith(missing)]
    with pytest.raises(DataError, match="no results of"):
        LearningStudy(results, learning_description())


# --- does growth pay? -------------------------------------------------------------------------


def test_growth_is_compared_seed_by_seed() -> None:
    study = GrowthStudy(growth_results(), growth_description())
    for rival, test in TESTS.items():
        if rival != "grown":
            lead = study.lead("grown", rival, CONTEXTS[0])
            assert lead.value == pytest.approx(70.0 - test, abs=0.2)
            assert lead.high - lead.low < 0.5, "luck that seeds share cancels"
    figures = growth_figures(study)
    assert figures["c1_mlp_glyphs_grown_vs_scratch"] == pytest.approx(-8.0, abs=0.2)
    assert figures["c1_grown_below_scratch"] == 2
    assert figures["c1_tuned_above_scratch"] == 2
    assert figures["c1_mlp_glyphs_grown_parameters"] == 1300
    found = {str(each)[2:14]: each for each in growth_verdicts(study)}
    assert len(found) >= 2, "some claims hold and some do not"


def test_a_claim_of_growth_needs_two_contexts() -> None:
    results = [
        replace(each, test=each.test + (5.0 if each.context == CONTEXTS[0] else 0.0))
        if each.controller == "scratch"
        else each
        for each in growth_results()
    ]
    study = GrowthStudy(results, growth_description())
    verdicts = {each.claim: each.state for each in growth_verdicts(study)}
    scratch = [state for claim, state in verdicts.items() if "from scratch with its own" in claim]
    assert scratch == [CONTRADICTED, NOT_SHOWN]


# --- the page ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("studies")
    first = write_study(home / "c1", growth_results(), growth_description())
    (first / "gromo.json").write_text(json.dumps(PEER), encoding="utf-8")
    second = write_study(home / "c2", learning_results(noise=1.5), learning_description())
    write_evidence([second, first], home / "out")
    return home


def test_page_figures_and_pictures_are_written(written: Path) -> None:
    out = written / "out"
    page = (out / "evidence.md").read_text(encoding="utf-8")
    figures = json.loads((out / "evidence.json").read_text(encoding="utf-8"))
    assert {"c2_gap_closed", "c2_vs_best_constant_lo", "c1_contexts"} <= set(figures)
    for name in ("growth", "profiles", "curves", "leads"):
        assert (out / f"evidence-{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"(evidence-{name}.png)" in page
    for group in ("trained in", "Held out: task", "Held out: host", "Held out: lesion"):
        assert group in page
    assert "peer 1.0, relu" in page
    assert f"{figures['c2_vs_best_constant']:+.2f} points" in page
    assert page.count("| **tamiyo** |") == len(GROUPS)


def test_the_same_results_give_the_same_files(written: Path, tmp_path: Path) -> None:
    write_evidence([written / "c1", written / "c2"], tmp_path)
    for path in (written / "out").iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_missing_study_is_named_as_missing(written: Path, tmp_path: Path) -> None:
    write_evidence([written / "c1"], tmp_path)
    page = (tmp_path / "evidence.md").read_text(encoding="utf-8")
    assert "learning to grow pays has not been studied here" in page


def test_wrong_folders_are_refused_with_a_reason(written: Path, tmp_path: Path) -> None:
    with pytest.raises(EsperError, match="no study to report"):
        write_evidence([], tmp_path)
    with pytest.raises(DataError, match="no finished study"):
        write_evidence([tmp_path], tmp_path)
    with pytest.raises(DuplicateNameError, match="same kind"):
        write_evidence([written / "c1", written / "c1"], tmp_path)
    broken = write_study(tmp_path / "broken", learning_results(), {"groups": GROUPS})
    with pytest.raises(DataError, match="lacks its best_heuristic"):
        write_evidence([broken], tmp_path)
    (broken / "study.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(DataError, match="is damaged"):
        write_evidence([broken], tmp_path)


def test_a_result_that_is_not_there_is_named() -> None:
    with pytest.raises(UnknownNameError, match="tamiyo-0 in nowhere"):
        learning_study().gains(TAMIYO, ["nowhere"])


def test_one_training_of_a_rival_confirms_nothing() -> None:
    only = [each for each in learning_results() if each.controller not in UNTAUGHT_BUT_ONE]
    for results, state in ((learning_results(), CONFIRMED), (only, NOT_SHOWN)):
        study = LearningStudy(results, learning_description())
        (verdict,) = (v for v in learning_verdicts(study) if v.claim.startswith("Being taught"))
        assert verdict.state == state
    assert "1 training of it tells nothing" in verdict.evidence


def test_results_that_another_controller_left_under_the_name_do_not_count() -> None:
    others = [replace(each, made="older", test=0.0) for each in learning_results()]
    made = {each.controller: each.made for each in learning_results()}
    study = LearningStudy([*learning_results(), *others], learning_description() | {"made": made})
    alone = LearningStudy(learning_results(), learning_description())
    assert study.lead(TRAINING, "best_constant") == alone.lead(TRAINING, "best_constant")
