"""The best episode of a run is played again, and its seeds are asked what they are worth."""

from dataclasses import replace

import pytest
import torch

from esper.karn.report.replays import SAME_ACCURACY, played_again, seed_worths
from esper.karn.report.run_facts import Facts, read_facts
from esper.karn.report.sections import contents
from tests.programs import esper_here
from tests.simic.training.tiny import tiny_files


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    folder = tmp_path_factory.mktemp("played")
    words = ["--file", tiny_files(folder), "--rounds", "2", "--out", folder / "run", "--quiet"]
    assert esper_here("train", "demo", *words).returncode == 0
    return read_facts(folder / "run")


def test_an_episode_is_played_again_but_for_rounding(facts: Facts) -> None:
    assert facts.stories
    for story in facts.stories:
        again = played_again(facts, story).ledger.current[0, : story.steps].tolist()
        assert again == pytest.approx(story.accuracy.tolist(), abs=SAME_ACCURACY)
        assert again[0] == story.accuracy[0]


def test_what_seeds_are_worth_sums_to_what_all_of_them_change(facts: Facts) -> None:
    asked = 0
    for story in facts.stories:
        worths = seed_worths(facts, story)
        population = played_again(facts, story).population
        off = torch.tensor([[False] * len(story.slots), [True] * len(story.slots)])
        both = population.counterfactual(torch.tensor([0, 0]), off, "validation").accuracy.double()
        assert sum(worths.values()) == pytest.approx(float(both[0] - both[1]), abs=1e-9)
        asked += len(worths)
    assert asked, "some seeds are on at the end"


def test_the_report_says_it_of_the_best_episode_where_it_can(facts: Facts) -> None:
    best = facts.stories[0]
    captions = [picture.caption for section in contents(facts) for picture in section.pictures]
    said = [caption for caption in captions if "(Shapley values): " in caption]
    assert len(said) == bool(seed_worths(facts, best))
    unlike = replace(best, accuracy=best.accuracy + 20.0)
    assert seed_worths(facts, unlike) == {}, "it was not played as it was"
    assert seed_worths(replace(facts, about={"suite": {"name": "x"}}), best) == {}
