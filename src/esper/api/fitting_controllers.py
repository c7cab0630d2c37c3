"""Controllers for a model of your own: by name, by path, or the one that comes with Esper."""

from pathlib import Path

from esper.kasmina.blueprints import blueprint_names
from esper.leyline import AgreementError, BlueprintCatalogue, EsperError, Family, UnknownNameError
from esper.simic.training.training_runs import CONFIG, RunFolder, load_controller
from esper.tamiyo.controllers import LearnedController, controller_names, make_controller
from esper.tamiyo.controllers.protocol import Checkable, Controller, Privileged

ENDLESS = 2**31  # epochs, where no budget says how many


def resolve(asked: str | Path, catalogue: BlueprintCatalogue, horizon: int | None) -> Controller:
    """The controller of that name, description or path, if it can decide for this host."""
    controller = made(asked)
    if type(controller) is LearnedController and not controller.blueprints:
        known = _known(controller)
        controller = LearnedController(controller.network, name=controller.name, blueprints=known)
    require_fitting(controller, catalogue, horizon)
    return controller


def _known(controller: LearnedController) -> tuple[str, ...]:
    """The blueprints of the hosts that it was trained on: as its run says, or else those of the
    only family that has as many as it can choose from."""
    folder = Path(controller.name)  # if it is kept in one
    if (folder / CONFIG).is_file():
        return RunFolder.open(folder).suite.training[0].catalogue().names
    lists = [blueprint_names(kind, wrapped=both) for kind in Family for both in (False, True)]
    number = controller.network.action_space.size("blueprint")
    alike = [names for names in lists if len(names) == number]
    return alike[0] if len(alike) == 1 else ()


def made(asked: str | Path) -> Controller:
    """The controller of that name, description or path, for whatever host."""
    word = str(asked)
    if word.partition(":")[0] in controller_names():
        return make_controller(word)
    if Path(word).is_dir():
        folder = Path(word).resolve()  # the same one from wherever it is asked for
        return load_controller(folder, name=str(folder))
    fix = "or the directory of a training run or of a saved agent"
    raise UnknownNameError.of("controller", word, controller_names(), fix)


def require_fitting(
    controller: Controller, catalogue: BlueprintCatalogue, horizon: int | None
) -> None:
    """Refuse a controller that cannot decide for this host."""
    if isinstance(controller, Privileged):
        raise EsperError(
            f"Controller {controller.name!r} has to be told the context of its host",
            fix="it only works in the garden; use 'heuristic' here",
        )
    if isinstance(controller, LearnedController) and horizon is None:
        raise EsperError(
            "A trained controller has to know how many epochs there are",
            fix="give them with the budget: Budget(params='+15%', epochs=20)",
        )
    try:
        if isinstance(controller, Checkable):
            controller.require_possible(catalogue, horizon or ENDLESS)
    except AgreementError as error:
        if type(controller) is not LearnedController:
            raise
        known, slots = controller.blueprints, controller.network.action_space.size("slot")
        named = f"give blueprints={list(known)} and " if known else ""
        raise EsperError(
            f"Controller {controller.name!r} was trained for other hosts",
            given=_told(len(catalogue.slots), catalogue.names),
            valid=_told(slots, known),
            fix=f"{named}name {slots} places in slots=[...], or use 'heuristic', which fits any "
            "model",
        ) from error


def _told(slots: int, blueprints: tuple[str, ...]) -> str:
    return f"{slots} slots" + f" with the blueprints {', '.join(blueprints)}" * bool(blueprints)
