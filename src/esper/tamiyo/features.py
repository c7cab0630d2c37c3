"""Observations: what a controller sees of each environment, as named numbers in known ranges.

A row is the global features, then one block of the same layout for every slot, so that a policy
can share weights between slots. Every number is free of the task's scale: losses in units of
guessing, accuracies above chance, parameters in units of the host's. What is not measured is 0,
and a presence flag beside it says so.

Shapes: `N` environments, `S` slots, `W` epochs remembered, `B` blueprints, `F` features, `G`
global features, `P` features of a slot.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import LIVING_STAGES, Blend, BlueprintCatalogue, SeedStage
from esper.leyline.errors import AgreementError, place_of
from esper.leyline.signals import FLOW_STATISTICS, SIGNAL_WINDOW, Signals
from esper.leyline.slots import require_form

LAGS = (1, 3, 7)  # epochs over which changes are shown
MOST_INTERVENTIONS = 8
GRADIENT_DECADES = 4.0  # powers of ten, each way, that a gradient or a ratio of them may span
CONTRIBUTION_SCALE = 10.0  # points
COST_STEPS = 1000.0  # a cost of one such part of the host is just visible


@dataclass(frozen=True)
class Feature:
    """One named number, or one for each of its options."""

    name: str
    low: float
    high: float
    scale: str  # how it is normalised
    what: str
    flags: tuple[str, ...] = ()  # the value is 0 unless all of these presence flags are 1
    options: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}.{option}" for option in self.options) or (self.name,)


def features_of(block: str, **options: tuple[str, ...]) -> tuple[Feature, ...]:
    """A block of `features.toml`; `options` of those features that have some, by name."""
    found = []
    for name, (unit, what, *flags) in _TABLES[block].items():
        scale, low, high = _TABLES["units"][unit]
        found.append(Feature(name, low, high, scale, what, tuple(flags), options.get(name, ())))
    return tuple(found)


_TABLES = tomllib.loads(Path(__file__).with_name("features.toml").read_text("utf-8"))
GLOBAL_FEATURES = features_of("global")


def slot_features(blueprints: tuple[str, ...]) -> tuple[Feature, ...]:
    """The block of one slot."""
    stages = tuple(stage.name for stage in SeedStage)
    blends = tuple(blend.name for blend in Blend)
    return features_of("slot", stage=stages, blueprint=blueprints, blend=blends)


class FeatureBlock:
    """Features that stand side by side, and what their columns are held to."""

    def __init__(self, features: tuple[Feature, ...]) -> None:
        self.features = features
        columns = [(name, feature) for feature in features for name in feature.names]
        self.names = [name for name, _ in columns]
        self.low = torch.tensor([feature.low for _, feature in columns])  # [columns]
        self.high = torch.tensor([feature.high for _, feature in columns])  # [columns]
        # [columns, columns]: 1 where a column (second axis) needs a flag (first)
        needs = [[flag in feature.flags for _, feature in columns] for flag in self.names]
        self._needs = torch.tensor(needs).float()

    def held(self, columns: Mapping[str, Tensor]) -> Tensor:
        """[..., columns] float32, within their ranges, and 0 where a presence flag is; from one
        tensor [...] for each feature, or [..., options].

        What was measured and still is NaN is Inf minus Inf: no difference.
        """
        parts = ((columns[feature.name], feature.options) for feature in self.features)
        # Each as float32 before they are put together: several times as fast as after it.
        whole = [part.float() if options else part.float()[..., None] for part, options in parts]
        seen = torch.cat(whole, -1)
        low, high, needs = (each.to(seen.device) for each in (self.low, self.high, self._needs))
        inside = seen.clamp_(low, high).nan_to_num_(0.0)
        return inside.masked_fill_((1.0 - inside) @ needs > 0.0, 0.0)


_GLOBAL = FeatureBlock(GLOBAL_FEATURES)


class FeatureTable:
    """Names, ranges and places of the features of one catalogue's observations."""

    def __init__(self, catalogue: BlueprintCatalogue) -> None:
        self.catalogue = catalogue
        self.slot_features = slot_features(catalogue.names)
        self.slot_block = block = FeatureBlock(self.slot_features)
        self.globals = len(_GLOBAL.names)  # G: how many global features there are
        self.per_slot = len(block.names)  # P: how many features a slot has
        # F names in order; those of a slot begin with the slot's name and a colon.
        inside = (f"{slot}:{name}" for slot in catalogue.slots.names for name in block.names)
        self.names = (*_GLOBAL.names, *inside)
        self.size = len(self.names)  # F: how many features there are

    @staticmethod
    @lru_cache(maxsize=64)
    def of(catalogue: BlueprintCatalogue) -> "FeatureTable":
        return FeatureTable(catalogue)

    def index(self, name: str) -> int:
        return place_of("feature", name, self.names)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The lowest and the highest value of each feature, [F] each."""
        slots = len(self.catalogue.slots)
        low = torch.cat([_GLOBAL.low, self.slot_block.low.repeat(slots)])
        return low, torch.cat([_GLOBAL.high, self.slot_block.high.repeat(slots)])

    def split(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """[..., F] as global features [..., G] and slots' features [..., S, P]."""
        if features.shape[-1:] != (self.size,):
            raise AgreementError(
                "Observations do not have this table's features",
                given=f"{list(features.shape)}",
                valid=f"[..., {self.size}]",
            )
        slots = features[..., self.globals :].unflatten(-1, (-1, self.per_slot))
        return features[..., : self.globals], slots

    def describe(self, observation: Tensor) -> dict[str, float]:
        """One observation [F] by name."""
        what = "Describe one observation at a time, with this table's features"
        require_form(what, observation, (self.size,))
        return dict(zip(self.names, observation.tolist(), strict=True))

    @cached_property
    def slot_constants(self) -> dict[str, Tensor]:
        """What a slot's features say of the host: [S] each."""
        slots = len(self.catalogue.slots)
        costs = self.catalogue.total_costs.flatten(1).double()  # [S, blueprints x blends]
        fitting = costs >= 0
        dear = costs.clamp(min=0).amax(1)
        cheap = costs.masked_fill(~fitting, math.inf).amin(1)
        host = max(self.catalogue.host_params, 1)
        return {
            "position": torch.arange(slots).double() / max(slots - 1, 1),
            "fits": fitting.any(1),
            "cheapest": visible_cost(cheap, host),
            "dearest": visible_cost(dear, host),
        }


def signals_to_features(signals: Signals) -> Tensor:
    """Observations [N, F] float32; finite and within the table's ranges whatever was measured.

    They are where the signals are.
    """
    table = FeatureTable.of(signals.catalogue)
    whole = _GLOBAL.held(global_columns(signals))
    blocks = table.slot_block.held(slot_columns(signals, table.slot_constants))  # [N, S, P]
    return torch.cat((whole, blocks.flatten(1)), 1)


def global_columns(signals: Signals) -> dict[str, Tensor]:
    """[N] each; anything where something is not measured."""
    life, window = signals.lifecycle, signals.train_loss.shape[1]
    if window != SIGNAL_WINDOW:
        raise AgreementError(
            "Signals remember the wrong number of epochs", given=window, valid=SIGNAL_WINDOW
        )
    guessing = math.log(max(signals.classes, 2))
    above = 100.0 - signals.chance if signals.classes > 1 else 100.0
    train = signals.train_loss.double() / guessing  # [N, W]
    loss = signals.validation_loss.double() / guessing
    accuracy = (signals.validation_accuracy.double() - signals.chance) / above
    committed = (signals.latest("committed_accuracy").double() - signals.chance) / above  # [N]
    known = ~(train.isnan() | loss.isnan() | accuracy.isnan())  # [N, W]
    best, place = accuracy.nan_to_num(-math.inf).max(1)
    horizon = signals.horizon.clamp(min=1).double()
    host = max(signals.catalogue.host_params, 1)
    added = life.params.sum(1)
    columns = {
        "epoch": life.epoch / horizon,
        "remaining": 1.0 - life.epoch / horizon,
        "measured": known[:, -1],
        "train_loss": train[:, -1],
        "validation_loss": loss[:, -1],
        "generalisation_gap": loss[:, -1] - train[:, -1],
        "validation_accuracy": accuracy[:, -1],
        "best_accuracy": best,
        "since_best": (window - 1 - place) / (window - 1),
        "committed_known": ~committed.isnan(),
        "committed_accuracy": committed,
        "uncommitted_gain": accuracy[:, -1] - committed,
        "loss_rise_known": life.loss_rise_known & ~life.loss_rise.isnan(),
        "loss_rise": life.loss_rise,
        "gradient_known": ~signals.host_gradient.isnan(),
        "gradient": decades(signals.host_gradient) / GRADIENT_DECADES,
        "added_params": added / host,
        "budget_room": (signals.budget - added).double() / host,
        "interventions": life.interventions / MOST_INTERVENTIONS,
        "living": life.at(*sorted(LIVING_STAGES)).double().mean(1),
        "fossilized": life.at(SeedStage.FOSSILIZED).double().mean(1),
    }
    for lag in LAGS:
        columns[f"measured_{lag}"] = known[:, -1] & known[:, -1 - lag]
        columns[f"train_loss_change_{lag}"] = train[:, -1] - train[:, -1 - lag]
        columns[f"validation_loss_change_{lag}"] = loss[:, -1] - loss[:, -1 - lag]
        columns[f"validation_accuracy_change_{lag}"] = accuracy[:, -1] - accuracy[:, -1 - lag]
    return columns


def slot_columns(signals: Signals, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """[N, S] each, or [N, S, options]."""
    life = signals.lifecycle
    horizon = signals.horizon.clamp(min=1).double()[:, None]

    def one_of(index: Tensor, options: int) -> Tensor:
        return index[..., None] == torch.arange(options, device=index.device)

    host_gradient = signals.host_gradient[:, None]
    flow = signals.flow
    if flow is None:
        flow = life.alpha.new_full((*life.shape, len(FLOW_STATISTICS)), torch.nan)
    spread, silence, peaks, roughness = flow.unbind(2)
    fixed = {name: each.to(flow.device).expand(life.shape) for name, each in constants.items()}
    return fixed | {
        "stage": one_of(life.stage, len(SeedStage)),
        "blueprint": one_of(life.blueprint, len(signals.catalogue.names)),
        "blend": one_of(life.blend, len(Blend)),
        "alpha": life.alpha,
        "age": life.age / horizon,
        "epochs_in_stage": life.epochs_in_stage / horizon,
        "embargo": life.embargo / horizon,
        "params": life.params / max(signals.catalogue.host_params, 1),
        "contribution_known": life.contribution_known & ~life.contribution.isnan(),
        "contribution": (life.contribution / CONTRIBUTION_SCALE).tanh(),
        "gradient_known": life.gradient_known & ~(life.gradient.isnan() | host_gradient.isnan()),
        "flow_known": ~(spread.isnan() | silence.isnan() | peaks.isnan()),
        "spread": spread,
        "silence": silence,
        "peaks": peaks / 2.0,
        "roughness_known": ~roughness.isnan(),
        "roughness": roughness,
        "gradient_ratio": (decades(life.gradient) - decades(host_gradient)) / GRADIENT_DECADES,
    }


def visible_cost(cost: Tensor, host: float) -> Tensor:
    """A share of the host's parameters or FLOPs, so that small ones can be told apart."""
    return (1.0 + COST_STEPS * cost / host).log10() / 4.0


def decades(size: Tensor) -> Tensor:
    """log10 of a size, within twice the span of features: a ratio of 0s or Infs is finite."""
    most = 10.0 ** (2.0 * GRADIENT_DECADES)
    return size.double().clamp(1.0 / most, most).log10()
