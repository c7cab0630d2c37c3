"""Controllers for a model of your own: by name, by path, or the one that comes with Esper."""

from dataclasses import dataclass
from pathlib import Path

from esper.kasmina.blueprints import blueprint_names
from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.errors import AgreementError, EsperError, UnknownNameError
from esper.leyline.slots import Family
from esper.simic.training.training_runs import CONFIG, RunFolder, load_controller
from esper.tamiyo.controllers import LearnedController, controller_names, make_controller
from esper.tamiyo.controllers.protocol import Checkable, Controller, Privileged

ENDLESS = 2**31  # epochs, where no budget says how many


class ControllerError(EsperError):
    """A controller that is missing, or that cannot decide for this model."""


@dataclass(frozen=True)
class TrainedFor:
    """The hosts that a trained controller knows."""

    slots: int
    blueprints: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.slots} slots with the blueprints {', '.join(self.blueprints)}"


def resolve(asked: str | Path, catalogue: BlueprintCatalogue, horizon: int | None) -> Controller:
    """The controller of that name, description or path, if it can decide for this host."""
    word = str(asked)
    if word.partition(":")[0] in controller_names():
        controller = make_controller(word)
        require_fitting(controller, catalogue, horizon)
        return controller
    if Path(word).is_dir():
        folder = Path(word).resolve()  # the same one from wherever it is asked for
        learned = load_controller(folder, name=str(folder))
        require_fitting(learned, catalogue, horizon, _trained_for(folder, learned))
        return learned
    if "/" in word or "\\" in word:
        raise ControllerError(
            "There is no trained controller at this path",
            given=word,
            valid="the directory of a training run or of a saved agent",
            fix="look for it in the directory that esper train wrote",
        )
    fix = "or the path of a trained one"
    raise UnknownNameError.of("controller", word, controller_names(), fix)


def require_fitting(
    controller: Controller,
    catalogue: BlueprintCatalogue,
    horizon: int | None,
    trained: TrainedFor | None = None,
) -> None:
    """Refuse a controller that cannot decide for this host."""
    if isinstance(controller, Privileged):
        raise ControllerError(
            f"Controller {controller.name!r} has to be told the context of its host",
            fix="it only works in the garden; use 'heuristic' here",
        )
    if not isinstance(controller, LearnedController):
        if isinstance(controller, Checkable):
            controller.require_possible(catalogue, horizon or ENDLESS)
        return
    if horizon is None:
        raise ControllerError(
            "A trained controller has to know how many epochs there are",
            fix="give them with the budget: Budget(params='+15%', epochs=20)",
        )
    if trained is None:
        trained = _by_sizes(controller)
    given = f"{len(catalogue.slots)} slots with the blueprints {', '.join(catalogue.names)}"
    fits = True
    try:
        controller.require_possible(catalogue, horizon)
    except AgreementError:
        fits = False
    if not fits or (trained.blueprints and trained.blueprints != catalogue.names):
        raise ControllerError(
            f"Controller {controller.name!r} was trained for other hosts",
            given=given,
            valid=str(trained),
            fix=f"name {trained.slots} slots of the same kind of activations, or use 'heuristic'",
        )


def _trained_for(folder: Path, controller: LearnedController) -> TrainedFor:
    """What it knows itself, or its run says, or its sizes tell."""
    slots = controller.network.space.size("slot")
    if (folder / CONFIG).is_file():
        contexts = RunFolder.open(folder).suite.training
        return TrainedFor(slots, contexts[0].catalogue().names)
    return _by_sizes(controller)


def _by_sizes(controller: LearnedController) -> TrainedFor:
    """What it says itself, or the blueprints of the only family that has as many."""
    space = controller.network.space
    if controller.blueprints:
        return TrainedFor(space.size("slot"), controller.blueprints)
    named = [
        names for kind in Family if len(names := blueprint_names(kind)) == space.size("blueprint")
    ]
    return TrainedFor(space.size("slot"), named[0] if len(named) == 1 else ())
