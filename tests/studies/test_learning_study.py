"""The whole study of learning, tiny: in one go and in parts it leaves the same behind."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.garden import Atlas, Context, Suite, episodes
from esper.leyline.errors import DataError
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.training.run_processes import init_distributed
from esper.tamiyo.controllers import Arm
from esper.tamiyo.controllers.learned import is_saved, load_saved_controller
from studies import learning_pays as c2
from studies.cohort import CohortSettings, MemberSettings, shares
from studies.folders import RESULTS, read_description
from studies.sizes import C2Size
from studies.tuning import TuningSize
from tests.garden.plots import LESION, NOISY, PLAIN
from tests.ranks import torchrun


def small(context: Context) -> Context:
    return replace(context, host_sizes=(("width", 8),), source=replace(context.source, samples=100))


SUITE = Suite(
    name="own", training=(small(PLAIN), small(NOISY)), heldout={"lesion": (small(LESION),)}
)
PPO = PPOConfig(minibatches=2, epochs=1)
TINY = C2Size(
    suite="own",
    trainings=2,
    blanked=1,
    untaught=1,
    rows=4,
    other_rows=2,
    cohort=CohortSettings(rounds=2, lesson_rounds=1, ppo=PPO, lstm=8),
    cases=2,
    tuning=TuningSize(candidates=1, seeds=1, finalists=1, final_seeds=1),
    episodes=1,
    at_once=18,
    save_every=1,
)
LEARNERS = ["tamiyo-0", "tamiyo-1", "blanked-0", "untaught-0"]


def made_up_atlas() -> Atlas:
    arms = tuple(
        Arm(slot=slot, blueprint=name, epoch=4)
        for slot, name in (("early", "convpool"), ("mid", "norm"), ("late", "norm"))
    )
    gain = torch.tensor([[[9.0] * 4, [2.0] * 4, [1.0] * 4], [[-2.0] * 4, [-1.0] * 4, [-3.0] * 4]])
    control = torch.full((2, 4), 40.0, dtype=torch.float64)
    nothing = torch.zeros_like(gain.double())
    return Atlas(SUITE.training, arms, control, control, gain.double(), gain.double(), nothing)


@contextmanager
def tiny() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episodes, "GARDEN_BATCHES", 1)
        patch.setattr(c2, "SIZES", {"tiny": TINY})
        patch.setattr(c2, "find_suite", lambda name: SUITE)
        patch.setattr(c2, "shipped_atlas", lambda suite: made_up_atlas())
        yield


@pytest.fixture(autouse=True, scope="module")
def _tiny() -> Iterator[None]:
    with tiny():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "whole"
    assert c2.run_c2(folder, "tiny")
    return folder


def left_behind(folder: Path) -> tuple[Any, ...]:
    """Everything that tables are made of."""
    lines = (folder / RESULTS).read_text().splitlines()
    return lines[0], sorted(lines[1:]), read_description(folder)


def test_in_parts_and_twice_it_leaves_the_same(whole: Path, tmp_path: Path) -> None:
    parts, stops = tmp_path / "parts", 0
    while not c2.run_c2(parts, "tiny", seconds=0.0):
        stops += 1
        assert stops < 20, "every part must get somewhere"
    assert stops >= 3
    assert left_behind(parts) == left_behind(whole)
    assert c2.run_c2(whole, "tiny", seconds=0.0), "nothing is left to do"

    study = read_description(whole)
    found = [json.loads(line) for line in (whole / RESULTS).read_text().splitlines()[1:]]
    played = {(each["controller"], each["context"]) for each in found}
    assert {("oracle", "plain"), ("apprentice-1", "noisy"), ("bandit", "lesion")} <= played
    assert ("oracle", "lesion") not in played, "it does not know held-out contexts"
    for name in LEARNERS:
        assert len(study["curves"][name]) == 2
        made = {each["made"] for each in found if each["controller"] == name}
        assert made == {study["made"][name]}
    atlas = made_up_atlas()
    measured = atlas.control.numel() + atlas.gain.numel()
    measured += atlas.plans.episodes if atlas.plans else 0
    assert study["episodes"]["tamiyo-0"] == 4 * 2 + measured, "who was taught pays for the teacher"
    assert study["episodes"]["untaught-0"] == 2 * 2
    assert is_saved(whole / "tamiyo")
    kept = load_saved_controller(whole / "tamiyo", "best")
    best = c2.best_training({n: [{"score": s} for _, s in p] for n, p in study["curves"].items()})
    assert kept.fingerprint == study["made"][best]


def go_on() -> None:
    """The next part of the study in the present folder, by all processes that were launched."""
    with tiny(), init_distributed("cpu") as processes:
        assert not c2.run_c2(Path(), "tiny", seconds=0.0, ranks=processes)


@pytest.mark.nightly
def test_two_ranks_tune_and_train_what_one_does_and_one_goes_on(
    whole: Path, tmp_path: Path
) -> None:
    study = read_description(whole)
    done = torchrun(2, f"{__name__}:go_on", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "tuned.json").read_text()) == study["searches"]["rules"]
    assert not c2.run_c2(tmp_path, "tiny", seconds=0.0)
    curves = json.loads((tmp_path / "curves.json").read_text())
    for name in LEARNERS:
        ours = [[point["episodes"], point["score"]] for point in curves[name]]
        assert len(ours) == 2
        assert ours[0] == pytest.approx(study["curves"][name][0]), "rows in other company"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 5))
def test_every_member_is_trained_by_one_rank_and_neighbours_together(
    rows: list[int], ranks: int
) -> None:
    members = [MemberSettings(name=str(n), rows=each, seed=n) for n, each in enumerate(rows)]
    found = [members[own] for own in shares(members, ranks)]
    assert [member for own in found for member in own] == members
    most = max(sum(member.rows for member in own) for own in found)
    assert most <= sum(rows) / ranks + max(rows)


def test_a_folder_of_another_size_is_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole, tmp_path / "study")
    other = C2Size(**{**vars(TINY), "episodes": 2})
    monkeypatch.setattr(c2, "SIZES", {"tiny": other})
    with pytest.raises(DataError, match="another size or of another atlas"):
        c2.run_c2(tmp_path / "study", "tiny")
