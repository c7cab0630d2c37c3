"""Controllers as directories: complete, checked, and Tamiyo as it comes with Esper."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.archive import ArchiveError, read_archive, write_archive
from esper.leyline import HEADS, AgreementError, BlueprintCatalogue, EsperError
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.simic.training.training_runs import load_controller
from esper.tamiyo import FactoredRecurrentActorCritic, FeatureTable, LearnedController
from esper.tamiyo.controllers import learned as module
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.auditioning import ATTENTIVE
from esper.tamiyo.controllers.learned import (
    KIND,
    VERSION,
    bundled,
    bundled_controller,
    is_saved,
    load_saved,
    load_saved_controller,
    save_controller,
)
from esper.tamiyo.saved_names import original_name
from tests.tamiyo.gardens import Tape, TapeGarden, catalogue_of, decisions, play

CATALOGUE = catalogue_of()
STATE, HIDDEN, LAYERS = FeatureTable.of(CATALOGUE).size, 16, 2
CARD = {"name": "own", "contexts": ["a", "b"], "score": 0.5, "cost": {"episodes": 9}}


def trained() -> FactoredRecurrentActorCritic:
    """Far from uniform, with everything set that training sets."""
    torch.manual_seed(0)
    network = FactoredRecurrentActorCritic(
        HEADS.resolve(CATALOGUE), state_dim=STATE, lstm_hidden_dim=HIDDEN, lstm_layers=LAYERS
    )
    for head in network.heads.values():
        torch.nn.init.normal_(head[-1].weight)  # type: ignore[index]
    network.observation_norm.observe(torch.randn(50, STATE) * 2 + 1)
    network.observation_norm.set_variance_floor(0.25)
    network.feature_mask[::5] = 0.0
    return network


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_controller(trained(), tmp_path / "controller", CATALOGUE, CARD)


def rewritten(
    path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
) -> Path:
    """The directory with notes and tensors changed, sealed like a real one."""
    old = read_archive(path, kind=KIND, version=VERSION)
    notes, tensors = dict(old.notes), dict(old.tensors)
    change(notes, tensors)
    return write_archive(path, kind=KIND, version=VERSION, tensors=tensors, notes=notes)


def refusal(path: Path) -> str:
    """What is said to who reads it: one sentence."""
    with pytest.raises(ArchiveError) as refused:
        load_saved_controller(path, "own")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_is_read_decides_as_what_was_kept(folder: Path) -> None:
    before, after = LearnedController(trained(), name="own"), load_saved_controller(folder, "own")
    assert after.name == "own"
    assert after.greedy
    assert not after.network.training
    assert after.fingerprint == before.fingerprint
    tape = Tape.random(16, seed=3)
    chosen = decisions(TapeGarden(tape), after, episodes=2)
    assert torch.equal(chosen, decisions(TapeGarden(tape), before, episodes=2))
    assert len(chosen.flatten(0, 1).unique(dim=0)) > 5, "it does not always do the same"


def test_slots_blueprints_and_card_come_back(folder: Path) -> None:
    kept = load_saved(folder)
    assert kept.slots == CATALOGUE.slots.names
    assert kept.blueprints == CATALOGUE.names
    assert kept.card == CARD
    assert kept.network.action_space == HEADS.resolve(CATALOGUE)
    assert load_saved_controller(folder, "own").blueprints == CATALOGUE.names


def test_what_is_kept_again_takes_the_place_of_what_was_there(folder: Path) -> None:
    other = trained()
    other.bias_action_logit("op", 0, 3.0)
    save_controller(other, folder, CATALOGUE, {})
    assert load_saved_controller(folder, "own").fingerprint == LearnedController(other).fingerprint
    assert load_saved(folder).card == {}
    assert len(list(folder.iterdir())) == 2


def test_only_directories_of_this_kind_are_kept_controllers(folder: Path, tmp_path: Path) -> None:
    other = write_archive(tmp_path / "other", kind="esper atlas", version=1, tensors={}, notes={})
    (tmp_path / "empty").mkdir()
    assert is_saved(folder)
    for path in (other, tmp_path / "empty", tmp_path / "missing"):
        assert not is_saved(path)
        refusal(path)
    assert "given: esper atlas version 1; valid: esper controller version 2 or 1" in refusal(other)


def test_another_version_is_refused(folder: Path) -> None:
    old = read_archive(folder, kind=KIND, version=VERSION)
    write_archive(folder, kind=KIND, version=VERSION + 1, tensors=old.tensors, notes=old.notes)
    assert f"version {VERSION + 1}" in refusal(folder)


def test_version_1_archive_loads_with_the_same_fingerprint(folder: Path) -> None:
    """Version 1 has the tensor names of Esper 0.1, under which fingerprints are computed."""
    expected = load_saved_controller(folder, "own")
    archive = read_archive(folder, kind=KIND, version=VERSION)
    names = HEADS.names
    tensors = {original_name(name, names): each for name, each in archive.tensors.items()}
    assert {"features.0.weight", "memory_norm.bias", "visible", "heads.3.2.bias"} <= set(tensors)
    write_archive(folder, kind=KIND, version=1, tensors=tensors, notes=archive.notes)

    loaded = load_saved_controller(folder, "own")

    assert loaded.fingerprint == expected.fingerprint
    tape = Tape.random(8, seed=3)
    assert torch.equal(decisions(TapeGarden(tape), loaded), decisions(TapeGarden(tape), expected))


def test_random_damage_is_refused_with_one_sentence_or_changes_nothing(folder: Path) -> None:
    whole = {file: file.read_bytes() for file in folder.iterdir()}
    expected = load_saved_controller(folder, "own").fingerprint
    dice = random.Random(1)
    refused = 0
    for _ in range(60):
        file = dice.choice(list(whole))
        data = bytearray(whole[file])
        if dice.random() < 0.2:
            del data[dice.randrange(len(data)) :]
        else:
            data[dice.randrange(len(data))] = dice.randrange(256)
        file.write_bytes(data)
        try:
            assert load_saved_controller(folder, "own").fingerprint == expected
        except ArchiveError as error:
            refused += "\n" not in str(error)
        file.write_bytes(whole[file])
    assert refused > 50


@pytest.mark.parametrize(
    "note", ["space", "state_dim", "lstm_hidden_dim", "lstm_layers", "slots", "blueprints", "card"]
)
def test_a_description_without_one_of_its_parts_is_refused(folder: Path, note: str) -> None:
    said = refusal(rewritten(folder, lambda notes, tensors: notes.pop(note)))
    assert "does not describe a controller" in said
    assert note in said


LIES: dict[str, dict[str, Any]] = {
    "fewer features": {"state_dim": STATE - 1},
    "no features": {"state_dim": 0},
    "a number as text": {"state_dim": str(STATE)},
    "a fraction": {"lstm_hidden_dim": float(HIDDEN)},
    "another memory": {"lstm_hidden_dim": HIDDEN * 2},
    "a negative memory": {"lstm_hidden_dim": -HIDDEN},
    "a memory that fits nowhere": {"lstm_hidden_dim": 2**40},
    "yes for one layer": {"lstm_layers": True},
    "fewer layers": {"lstm_layers": LAYERS - 1},
    "more layers": {"lstm_layers": LAYERS + 1},
    "an empty space": {"space": {}},
    "no space": {"space": None},
    "slots that are no list": {"slots": 3},
    "fewer slots than the space has": {"slots": ["early", "mid"]},
    "blueprints that are no list": {"blueprints": None},
    "fewer blueprints than the space has": {"blueprints": list(CATALOGUE.names[1:])},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_descriptions_that_lie_are_refused(folder: Path, lie: dict[str, Any]) -> None:
    said = refusal(rewritten(folder, lambda notes, tensors: notes.update(lie)))
    assert "does not describe a controller" in said


def test_heads_of_other_sizes_are_refused(folder: Path) -> None:
    def lie(notes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        notes["space"] = {**notes["space"], "sizes": [5, 3, 9, 3]}

    assert "does not describe a controller" in refusal(rewritten(folder, lie))


@pytest.mark.parametrize("lie", [{"lstm_hidden_dim": HIDDEN * 2}, {"lstm_layers": LAYERS + 1}])
def test_sizes_are_compared_before_memory_is_taken_for_them(
    folder: Path, lie: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten(folder, lambda notes, tensors: notes.update(lie))

    def build(*args: object, **sizes: int) -> None:
        pytest.fail(f"a network was built that the tensors do not have: {sizes}")

    monkeypatch.setattr(module, "FactoredRecurrentActorCritic", build)
    refusal(folder)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("observation_norm.mean", None),
        ("observation_norm.floor", None),
        ("value_head.0.bias", None),
        ("value_head.0.bias", torch.zeros(3)),
        ("surplus", torch.zeros(1)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    folder: Path, name: str, tensor: torch.Tensor | None
) -> None:
    def change(notes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    said = refusal(rewritten(folder, change))
    assert "does not describe a controller" in said
    assert name in said


# --- for which hosts -----------------------------------------------------------------------


def others() -> dict[str, BlueprintCatalogue]:
    names = CATALOGUE.names
    return {
        "in another order": replace(CATALOGUE, names=(names[1], names[0], *names[2:])),
        "under another name": replace(CATALOGUE, names=(*names[:-1], "own")),
        "of another host": catalogue_of("mlp"),
    }


@pytest.mark.parametrize("which", ["in another order", "under another name", "of another host"])
def test_other_blueprints_than_it_was_trained_on_are_refused(folder: Path, which: str) -> None:
    controller = load_saved_controller(folder, "own")
    controller.require_possible(CATALOGUE, DEFAULT_EPISODE_LENGTH)
    with pytest.raises(AgreementError, match="trained controller and the host disagree"):
        controller.require_possible(others()[which], DEFAULT_EPISODE_LENGTH)


def test_a_directory_is_loaded_like_a_run(folder: Path) -> None:
    loaded = load_controller(folder)
    assert loaded.name == "tamiyo(controller)"
    assert loaded.fingerprint == load_saved_controller(folder, "own").fingerprint
    assert loaded.blueprints == CATALOGUE.names
    tape = Tape.random(8, seed=5)
    own = load_saved_controller(folder, "own")
    assert torch.equal(decisions(TapeGarden(tape), loaded), decisions(TapeGarden(tape), own))
    rewritten(folder, lambda notes, tensors: notes.update(state_dim=1))
    with pytest.raises(ArchiveError, match="does not describe a controller"):
        load_controller(folder)


# --- what comes with Esper -------------------------------------------------------------------

specialist = partial(bundled_controller, "specialist")


def test_the_specialist_decides_legally_on_the_hosts_it_was_made_for() -> None:
    controller = specialist()
    controller.require_possible(CATALOGUE, DEFAULT_EPISODE_LENGTH)
    ops = set()
    for actions in play(TapeGarden(Tape.random(16, seed=1)), controller):  # looks at every decision
        ops |= set(actions["op"].tolist())
    assert len(ops) > 1, "it does something"


def test_two_specialists_do_not_share_what_they_remember() -> None:
    tapes = Tape.random(6, seed=1), Tape.random(9, seed=2)
    alone = [decisions(TapeGarden(tape), specialist()) for tape in tapes]
    ours, theirs = (play(TapeGarden(tape), specialist()) for tape in tapes)
    in_turns = zip(*((a.values, b.values) for a, b in zip(ours, theirs, strict=True)), strict=True)
    for expected, heard in zip(alone, in_turns, strict=True):
        assert torch.equal(torch.stack(heard, 1), expected)


def test_the_specialist_says_what_it_is() -> None:
    kept = bundled("specialist")
    assert kept.slots == CATALOGUE.slots.names
    assert kept.blueprints == CATALOGUE.names
    assert kept.network.state_dim == STATE
    assert kept.card["name"] == "specialist"
    assert kept.card["contexts"]
    assert kept.card["episodes"] > 0


def test_tamiyo_hears_as_much_as_it_was_taught_with_and_says_what_it_is() -> None:
    kept = bundled()
    assert kept.rule == ATTENTIVE.name
    assert kept.slots == kept.blueprints == ()
    assert (kept.card["name"], kept.card["suite"]) == ("tamiyo", "greenhouse")
    assert kept.card["episodes"] > 0
    assert kept.card["limits"]
    assert set(kept.card["validation"]) == {"net_points", "harmful_rate"}
    assert bundled_controller().network is not bundled_controller().network


def test_the_specialist_is_made_by_its_name() -> None:
    made = make_controller("specialist", CATALOGUE)
    assert isinstance(made, LearnedController)
    assert made.name == "specialist"
    assert made.fingerprint == specialist().fingerprint
    tape = Tape.random(5, seed=7)
    expected = decisions(TapeGarden(tape), specialist())
    assert torch.equal(decisions(TapeGarden(tape), made), expected)
    with pytest.raises(EsperError, match="greedy"):
        make_controller("specialist:greedy=false")
    with pytest.raises(AgreementError, match="disagree"):
        make_controller("specialist", catalogue_of("mlp"))
