"""Saved runs, controllers and calls that name a removed blueprint are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.api.grown_runs import CHECKPOINT, KIND, VERSION, read_report
from esper.archive import read_archive, write_archive
from esper.kasmina import SlottedModel
from esper.kasmina.blueprints import (
    blueprint,
    build_catalogue,
    find_blueprint,
    unregister_blueprint,
    zeroed,
)
from esper.leyline import LifecycleOp
from esper.leyline.catalogue import REMOVED_BLUEPRINTS, BlueprintCatalogue
from esper.leyline.errors import UnknownNameError
from esper.leyline.slots import Family, SlotSpec
from esper.tamiyo.controllers.learned import save_controller
from esper.tamiyo.features import FeatureTable
from esper.tamiyo.network import FactoredRecurrentActorCritic
from tests.api.tables import TRAIN, VAL, Script, mlp, require_same, states, wrapped

MESSAGE = (
    r"^Blueprint 'twin' was removed in Esper 0\.2\.0; load a run or controller that names it with "
    r"Esper 0\.1\.x \(commit 28b7a14\), or choose another blueprint\.$"
)
SETTINGS: dict[str, Any] = {
    "loss": "cross_entropy",
    "budget": esper.Budget("+500%", epochs=4),
    "slots": ["2", "5"],
    "batch_size": 16,
}


def encoded(names: list[str]) -> Tensor:
    """Blueprint names as a host's state holds them."""
    return torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8)


def rename_planted(state: dict[str, Any], names: tuple[str, ...], planted: str) -> dict[str, Any]:
    """The state of a host in which the blueprint `planted` has the name `twin`."""
    renamed = ["twin" if name == planted else name for name in names]
    return state | {"blueprint_names": encoded(renamed)}


def test_every_removal_names_a_release_and_a_commit() -> None:
    for name, removal in REMOVED_BLUEPRINTS.items():
        assert name.isidentifier()
        assert removal.removed_in.count(".") == 2
        assert removal.last_release
        assert len(removal.last_commit) == 7


@pytest.mark.parametrize("family", list(Family))
def test_lookup_of_a_removed_blueprint_names_the_last_version(family: Family) -> None:
    with pytest.raises(UnknownNameError, match=MESSAGE):
        find_blueprint("twin", family)


def test_catalogue_with_a_removed_blueprint_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=MESSAGE):
        build_catalogue(wrapped().specs, host_params=100, allowed=["norm", "twin"])
    with pytest.raises(UnknownNameError, match=MESSAGE):
        wrapped(blueprints=["twin"])


def test_calls_with_a_removed_blueprint_are_refused() -> None:
    host = wrapped()
    with pytest.raises(UnknownNameError, match=MESSAGE):
        host.germinate("2", "twin")
    with pytest.raises(UnknownNameError, match=MESSAGE):
        host.explain(LifecycleOp.GERMINATE, "2", blueprint="twin")
    assert not host.lifecycle.occupied.any()


def test_unknown_names_are_still_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'norm'"):
        wrapped().germinate("2", "nrm")


def test_a_registered_blueprint_may_have_a_removed_name() -> None:
    @blueprint("twin", "dense")
    def twin(spec: SlotSpec) -> nn.Module:
        """One linear layer."""
        return zeroed(nn.Linear(spec.channels, spec.channels))

    try:
        host = wrapped()
        host.germinate("2", "twin")
        loaded_host = wrapped()
        loaded_host.load_state_dict(host.state_dict())
        assert loaded_host.seed_slots["2"].blueprint == "twin"
    finally:
        unregister_blueprint("twin", "dense")


def test_state_with_a_seed_of_a_removed_blueprint_is_refused() -> None:
    saved = wrapped()
    saved.germinate("2", "mlp")
    state = rename_planted(saved.state_dict(), saved.catalogue.names, planted="mlp")
    host = wrapped()
    before = states(host)
    with pytest.raises(UnknownNameError, match=MESSAGE):
        host.load_state_dict(state)
    require_same(states(host), before)


def test_state_that_only_offered_a_removed_blueprint_is_refused() -> None:
    saved = SlottedModel(mlp(), ["2"], TRAIN[0][:4])
    state = saved.state_dict()
    state["blueprint_names"] = encoded([*saved.catalogue.names, "twin"])
    with pytest.raises(UnknownNameError, match=MESSAGE):
        SlottedModel(mlp(), ["2"], TRAIN[0][:4]).load_state_dict(state)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished run in which a seed grew."""
    script = Script({1: ("plant", "2", "mlp", "immediate")})
    esper.grow(mlp(), TRAIN, VAL, controller=script, out=tmp_path / "run", quiet=True, **SETTINGS)
    return tmp_path / "run"


def rewrite_checkpoint(
    folder: Path, names: list[str] | None = None, blueprints: list[str] | None = None
) -> None:
    """Change the catalogue's names and the run's setting `blueprints` in a checkpoint."""
    archive = read_archive(folder / CHECKPOINT, kind=KIND, version=VERSION)
    tensors = dict(archive.tensors)
    if names is not None:
        tensors["host.blueprint_names"] = encoded(names)
    notes = dict(archive.notes)
    notes["settings"] = notes["settings"] | {"blueprints": blueprints}
    for record in notes["history"]:
        if record["decision"]["blueprint"] == "mlp":
            record["decision"]["blueprint"] = "twin"
    path = folder / CHECKPOINT
    write_archive(path, kind=KIND, version=VERSION, tensors=tensors, notes=notes)


def test_run_folder_with_a_removed_blueprint_is_refused(run_folder: Path) -> None:
    names = ["twin" if name == "mlp" else name for name in wrapped().catalogue.names]
    rewrite_checkpoint(run_folder, names=names)
    with pytest.raises(UnknownNameError, match=MESSAGE):
        esper.resume(run_folder, mlp(), TRAIN, VAL)


def test_run_folder_whose_settings_name_a_removed_blueprint_is_refused(run_folder: Path) -> None:
    rewrite_checkpoint(run_folder, blueprints=["mlp", "twin"])
    with pytest.raises(UnknownNameError, match=MESSAGE):
        esper.resume(run_folder, mlp(), TRAIN, VAL)


def test_report_of_a_run_with_a_removed_blueprint_is_readable(run_folder: Path) -> None:
    names = ["twin" if name == "mlp" else name for name in wrapped().catalogue.names]
    rewrite_checkpoint(run_folder, names=names)
    decisions = [str(epoch.decision) for epoch in read_report(run_folder).epochs]
    assert "plant twin at 2 (immediate)" in decisions


@pytest.mark.parametrize(
    "controller",
    ["heuristic:places=2/twin", "heuristic:places=*/twin", "fixed:slot=2,blueprint=twin,epoch=1"],
)
def test_rule_with_a_removed_blueprint_is_refused(controller: str) -> None:
    with pytest.raises(UnknownNameError, match=MESSAGE):
        esper.grow(mlp(), TRAIN, VAL, controller=controller, quiet=True, **SETTINGS)


def save_trained_controller(folder: Path, catalogue: BlueprintCatalogue) -> Path:
    """Save an untrained network as a controller whose choices are those of this catalogue."""
    space = wrapped().space
    state_dim = FeatureTable.of(catalogue).size
    network = FactoredRecurrentActorCritic(space, state_dim=state_dim, lstm_hidden_dim=4)
    return save_controller(network, folder, catalogue, {})


def test_trained_controller_with_a_removed_choice_is_refused(tmp_path: Path) -> None:
    host = wrapped(budget=esper.Budget(epochs=4))
    catalogue = host.catalogue
    names = (*catalogue.names[:-1], "twin")
    old_catalogue = BlueprintCatalogue(
        catalogue.slots, names, catalogue.costs, catalogue.blend_costs, catalogue.host_params
    )
    controller = save_trained_controller(tmp_path / "controller", old_catalogue)
    with pytest.raises(UnknownNameError, match=MESSAGE):
        host.require_controller(controller)
    fitting = save_trained_controller(tmp_path / "fitting", catalogue)
    assert host.require_controller(fitting).name == str(fitting)
