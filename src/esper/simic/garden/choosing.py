"""Controllers by name, those that know a suite's atlas included."""

from esper.leyline.errors import DataError
from esper.simic.garden.atlas import Atlas
from esper.simic.garden.atlases import shipped_atlas
from esper.tamiyo.controllers import Controller, FixedSchedule, Oracle, make_controller
from esper.tolaria.garden.suites import Suite

FROM_ATLAS = ("best_constant", "oracle")


def controller_of(name: str, suite: Suite, atlas: Atlas | None = None) -> Controller:
    """A controller by its name or spec; `best_constant` and `oracle` come from the atlas."""
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
        return FixedSchedule(atlas.best_constant())
    known = {context.key: arm for context, arm in zip(atlas.contexts, atlas.best(), strict=True)}
    return Oracle({context.name: known[context.key] for context in suite.training})
