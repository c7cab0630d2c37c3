"""Controllers by name: `make_controller("fixed:slot=early,blueprint=conv,epoch=5")`."""

from collections.abc import Callable
from typing import Any

from esper.leyline import DEFAULT_EPISODE_LENGTH, BlueprintCatalogue
from esper.leyline.errors import register, require_known
from esper.tamiyo.controllers.auditioning import Audition, AuditionConfig
from esper.tamiyo.controllers.learned import BundledSettings, bundled_controller
from esper.tamiyo.controllers.protocol import Checkable, Controller
from esper.tamiyo.controllers.racing import Race, RaceConfig
from esper.tamiyo.controllers.rules import OWN_SETTINGS, Heuristic, HeuristicConfig
from esper.tamiyo.controllers.schedules import FixedSchedule, FixedSettings, OracleSettings
from esper.tamiyo.controllers.specs import S, Settings, parse_settings

Kind = tuple[type[Settings], Callable[[Any], Controller]]  # what can be set; how to build one
_KINDS: dict[str, Kind] = {}


def register_controller(name: str, settings: type[S], build: Callable[[S], Controller]) -> None:
    """Make `name` known; `settings` is a frozen dataclass of numbers, names and lists of them."""
    kind: Kind = (settings, build)
    register("Controller", name, kind, _KINDS)


def controller_names() -> tuple[str, ...]:
    return tuple(_KINDS)


def make_controller(
    spec: str, catalogue: BlueprintCatalogue | None = None, horizon: int = DEFAULT_EPISODE_LENGTH
) -> Controller:
    """The controller that `name:setting=value,…` describes.

    With a catalogue, names of slots and blueprints are checked now and not at the first decision,
    and epochs against the episode's length.
    """
    name, _, text = spec.strip().partition(":")
    require_known("controller", name, _KINDS)
    settings, build = _KINDS[name]
    controller = build(parse_settings(name, text, settings))
    if catalogue is not None and isinstance(controller, Checkable):
        controller.require_possible(catalogue, horizon)
    return controller


for _own in OWN_SETTINGS:
    register_controller(_own.kind, _own, lambda controller: controller)
register_controller("fixed", FixedSettings, lambda settings: FixedSchedule(settings.arms()))
register_controller("race", RaceConfig, Race)
register_controller("audition", AuditionConfig, Audition)
register_controller("heuristic", HeuristicConfig, Heuristic)
register_controller("oracle", OracleSettings, OracleSettings.oracle)
register_controller("tamiyo", BundledSettings, lambda _: bundled_controller())
register_controller("specialist", BundledSettings, lambda _: bundled_controller("specialist"))
