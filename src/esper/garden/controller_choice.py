"""Controllers by name, those included that know a suite: from its atlas, or tuned on it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from esper.garden.atlas import Atlas, shipped_atlas
from esper.garden.suites import Suite
from esper.leyline import Actions, BlueprintCatalogue, DataError, Legality
from esper.leyline.signals import Signals
from esper.tamiyo.controllers import Controller, FixedSchedule, Oracle, make_controller
from esper.tamiyo.controllers.protocol import Checkable

FROM_ATLAS = ("best_constant", "oracle")

# The best rule that was found for each suite; docs/controllers.md has the search.
TUNED: Mapping[str, str] = {
    "garden": "heuristic:places=early/conv+mid/token_mix+late/norm,patience=0,first=3,together=3,"
    "spacing=1,probation=4,trial=7,margin=1",
    "garden_mlp": "race:places=early/convpool,first=3,epochs=5",
}


@dataclass(frozen=True)
class Renamed:
    """A controller under another name."""

    controller: Controller
    name: str

    @property
    def fingerprint(self) -> str:
        return self.controller.name

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        return self.controller.act(signals, legality, starts)

    def require_possible(self, catalogue: BlueprintCatalogue, horizon: int) -> None:
        if isinstance(self.controller, Checkable):
            self.controller.require_possible(catalogue, horizon)


def controller_of(name: str, suite: Suite, atlas: Atlas | None = None) -> Controller:
    """A controller by its name or spec.

    `best_constant` and `oracle` come from the atlas; `heuristic` is the rule that was tuned on the
    suite, and the general one elsewhere.
    """
    if name == "heuristic" and suite.name in TUNED:
        return Renamed(make_controller(TUNED[suite.name]), name)
    if name not in FROM_ATLAS:
        return make_controller(name)
    atlas = atlas or shipped_atlas(suite)
    if atlas is None:
        raise DataError(
            f"Controller {name!r} needs an atlas of suite {suite.name!r}",
            given="none is shipped",
            fix="use the suites garden or garden_mlp",
        )
    if name == "best_constant":
        return Renamed(FixedSchedule(atlas.constant()), name)
    plans = zip(atlas.contexts, atlas.schedules(), strict=True)
    known = {context.key: schedule for context, schedule in plans}
    return Oracle({context.name: known[context.key] for context in suite.training})
