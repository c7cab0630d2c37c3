"""The columns of observations: every feature computed from signals, before it is held to its range.

Shapes: `N` environments, `S` slots, `W` epochs remembered.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from esper.leyline.errors import AgreementError
from esper.leyline.ops import Blend
from esper.leyline.signals import FLOW_STATISTICS, SIGNAL_WINDOW, Signals
from esper.leyline.stages import LIVING_STAGES, SeedStage

LAGS = (1, 3, 7)  # epochs over which changes are shown
MOST_INTERVENTIONS = 8
GRADIENT_DECADES = 4.0  # powers of ten, each way, that a gradient or a ratio of them may span
CONTRIBUTION_SCALE = 10.0  # points


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
        "gradient": _decades(signals.host_gradient) / GRADIENT_DECADES,
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
        return index[..., None] == torch.arange(options)

    host_gradient = signals.host_gradient[:, None]
    flow = signals.flow
    if flow is None:
        flow = torch.full((*life.shape, len(FLOW_STATISTICS)), torch.nan, dtype=torch.float64)
    spread, silence, peaks, roughness = flow.unbind(2)
    fixed = {name: value.expand(life.shape) for name, value in constants.items()}
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
        "gradient_ratio": (_decades(life.gradient) - _decades(host_gradient)) / GRADIENT_DECADES,
    }


def _decades(size: Tensor) -> Tensor:
    """log10 of a size, within twice the span of features: a ratio of 0s or Infs is finite."""
    most = 10.0 ** (2.0 * GRADIENT_DECADES)
    return size.double().clamp(1.0 / most, most).log10()
