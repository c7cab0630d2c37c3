"""The published evidence follows from the raw results beside it, and is about what is shipped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.garden.statistics import Array, Estimate
from esper.tamiyo.controllers.learned import bundled, bundled_controller
from studies.boxed import best_of, card_of
from studies.garden_plots import GARDEN
from studies.judging import read_judged
from studies.report import transfer_results
from studies.report.learning import CONSTANT, TAMIYO, TRAINING, LearningStudy
from studies.report.transfer import page_of
from studies.report.transfer_results import Results, figures_of, opened

DOCS = Path(__file__).parents[2] / "docs"
TRANSFER = DOCS / "evidence" / "transfer"
Compare = Callable[..., Estimate]


@pytest.fixture(scope="module")
def study() -> LearningStudy:
    return LearningStudy.read(DOCS / "evidence" / "c2")


def test_the_specialist_in_the_box_is_one_of_those_that_were_measured(study: LearningStudy) -> None:
    card = bundled("specialist").card
    assert card["training"] in study.trainings[TAMIYO]
    made = study.description["made"][card["training"]]
    assert bundled_controller("specialist").fingerprint == made
    assert card["contexts"] == study.groups[TRAINING]


def test_the_published_figures_follow_from_the_raw_results(study: LearningStudy) -> None:
    figures = json.loads((DOCS / "evidence.json").read_text(encoding="utf-8"))

    def is_published(name: str, found: Estimate | None) -> None:
        assert found is not None
        ends = [figures[name], figures[f"{name}_lo"], figures[f"{name}_hi"]]
        assert ends == pytest.approx(list(found), rel=1e-9)

    is_published("c2_vs_best_constant", study.lead(TRAINING, CONSTANT))
    is_published("c2_vs_best_heuristic", study.lead(TRAINING, study.best_heuristic))
    is_published("c2_gap_closed", study.gap_closed(TRAINING))
    is_published("c2_harmful_rate", study.harmful(TAMIYO, TRAINING))
    for group in ("task", "host"):
        is_published(f"c2_heldout_{group}_vs_best_constant", study.lead(group, CONSTANT))


def computed_once(compare: Compare) -> Compare:
    """Return the same function with a cache: the page, the figures and the card of the controller
    are made of the same comparisons."""
    estimates: dict[tuple[object, ...], Estimate] = {}

    def compared(ours: Array, theirs: Array, **how: Any) -> Estimate:
        arrays = [(array.shape, array.tobytes()) for array in (ours, theirs)]
        key = (*arrays, *sorted(how.items()))
        if key not in estimates:
            estimates[key] = compare(ours, theirs, **how)
        return estimates[key]

    return compared


@pytest.mark.slow
def test_the_study_of_transfer_is_what_its_raw_results_say_and_its_best_training_is_bundled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("paired_difference", "difference_elsewhere"):
        compare = getattr(transfer_results, name)
        monkeypatch.setattr(transfer_results, name, computed_once(compare))
    card = bundled().card
    with opened(TRANSFER / "results.tar.xz") as folder:
        results = Results.read(folder)
        assert page_of(results) == (DOCS / "transfer.md").read_text(encoding="utf-8")
        nets = read_judged(folder / "judged", GARDEN)
    figures = figures_of(results)
    published = json.loads((DOCS / "evidence.json").read_text(encoding="utf-8"))
    assert figures == pytest.approx({name: published[name] for name in figures}, rel=1e-9)
    best = best_of(results)
    wanted = dict(card_of(results, best))
    assert card["evidence"] == pytest.approx(wanted["evidence"], rel=1e-9)
    assert {**card, "evidence": None} == {**wanted, "evidence": None}
    assert card["training"] == best
    (made,) = {net.made for net in nets if net.controller == card["training"]}
    assert bundled_controller().fingerprint == made
