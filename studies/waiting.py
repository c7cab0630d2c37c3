"""What it is worth to wait: planting may be put off until more was heard, or for good.

A host that listens can be told at any moment what planting then would be worth, by an estimate that
was fitted to gains (`Worth`), less the price of harm. Who waits gets that of the first later moment
at which planting is worth more than to wait on; so what waiting is worth is found by going over
moments (`studies/listening.py`) again and again, each time with the decisions that follow from what
was known of it before. Which moment is chosen and what it is worth are said by two estimates that
learned from different plots, or chance would be taken for a reason to wait. (Which seed would be
planted is said by one fit to all plots: so far as it knows some by heart, both are too hopeful.)

Shapes: `D` decisions, `M` moments, `F` features.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from esper.garden import LAYOUT
from esper.leyline import HEAD_NAMES
from esper.leyline.streams import derive_seed
from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers.learned import is_saved, load_saved, save_controller
from studies.ablations import ablated
from studies.averaged import Averaged, decode_without_memory
from studies.greenhouse_gains import Gains
from studies.listening import EPOCHS, Moments
from studies.preferences import Preferences

ROUNDS, EPOCHS_OF_ROUND, EPOCHS_OF_WORTH = 5, 4, 10
BATCH = 1024


class Worth(Averaged):
    """Says of a moment what something is worth, as the network's value."""

    def learn(self, seen: Tensor, worth: Tensor, weight: Tensor, epochs: int, seed: int) -> None:
        """Rows [D, F], what each is worth [D], and how much it counts [D]."""
        chance = torch.Generator().manual_seed(derive_seed(seed, "order"))
        for _ in range(epochs):
            for index in torch.randperm(len(seen), generator=chance).split(BATCH):
                found = decode_without_memory(self.network, seen[index])[1]
                loss = weight[index] * (found - worth[index]).square()
                self.step(loss.sum() / weight[index].sum().clamp(min=1e-6))

    def of(self, seen: Tensor) -> Tensor:
        """[D]"""
        return value_of(self.mean, seen)


@torch.no_grad()
def value_of(network: TokenActorCritic, seen: Tensor) -> Tensor:
    """[D] of rows [D, F]"""
    batches = seen.split(8 * BATCH)
    return torch.cat([decode_without_memory(network, batch)[1] for batch in batches])


@torch.no_grad()
def planted_worth(
    network: TokenActorCritic, data: Gains, harm: float, unit: float
) -> tuple[Tensor, Tensor]:
    """[D] each: what the seed that it likes best of those tried is worth, and how near that is to
    what it would plant; 0 where nothing was tried."""
    batches = data.observations.split(8 * BATCH)
    logits_of_batches = [decode_without_memory(network, batch)[0] for batch in batches]
    logits = {
        head: torch.cat([batch_logits[head] for batch_logits in logits_of_batches])
        for head in HEAD_NAMES
    }
    preferred, worth = Preferences.of(logits, data), data.worth(harm, unit)[:, 1:]
    there = ~worth.isnan()
    liked = preferred.liked(there)
    near = preferred.near.gather(1, liked)[:, 0] * there.any(1)
    return worth.gather(1, liked)[:, 0].nan_to_num(0.0), near


def waited(after: Tensor, stops: Tensor, worth: Tensor) -> Tensor:
    """[M]: what comes of waiting at each moment, if it is planted at the next one that `stops` [M]
    bool and is then `worth` [M]; 0 if there is none."""
    found = torch.zeros_like(worth)
    later, known = after.clamp(min=0), after >= 0
    for _ in EPOCHS:  # no case has more moments
        found = torch.where(known, torch.where(stops[later], worth[later], found[later]), 0.0)
    return found


def worth_of_waiting(
    moments: Moments, planting: tuple[Tensor, Tensor], tell: Callable[[str], None] = print
) -> Worth:
    """Of the moments' worth of planting [M], as two estimates say it."""
    waiting, everyone = Worth(0, str(planting[0].device)), torch.ones_like(planting[0])
    now = torch.zeros_like(planting[0])
    for turn in range(ROUNDS):
        ways = [waited(moments.after, one > now, other)
                for one, other in (planting, planting[::-1])]  # fmt: skip
        told = torch.stack(ways).mean(0)
        waiting.learn(moments.observations, told, everyone, EPOCHS_OF_ROUND, turn)
        now = waiting.of(moments.observations).clamp(min=0.0)
        stops = float((planting[0] > now).float().mean())
        off = float((now - told).square().mean().sqrt())
        tell(f"turn {turn + 1}: waiting is worth {float(told.mean()):.4f}, planting more in "
             f"{stops:.3f} of moments, error {off:.3f}")  # fmt: skip
    return waiting


def estimate_waiting(options: argparse.Namespace) -> None:
    """Keep a network whose value says what waiting is worth, for a fit and a price of harm."""
    if is_saved(options.out):
        return
    data, moments = Gains.load(options.gains), Moments.load(options.moments)
    learned = data.first & (data.plot % 8 != 7)  # others judge fits
    data = ablated(options.ablation, data.rows(learned.nonzero()[:, 0]))
    data = data.changed(lambda part: part.to(options.device))
    moments = ablated(options.ablation, moments)
    moments = Moments(*(part.to(options.device) for part in moments))
    network = load_saved(options.fitted).network.to(options.device)
    assert isinstance(network, TokenActorCritic), "what `fit` wrote"
    worth, near = planted_worth(network.with_layout(LAYOUT), data, options.harm, options.unit)
    estimates = []
    for half in (0, 1):
        own, other = ((data.plot % 2 == each).nonzero()[:, 0] for each in (half, 1 - half))
        if not len(own):
            raise SystemExit("What waiting is worth is told by two halves: one plot is too few")
        known = Worth(half, options.device)
        known.learn(data.observations[own], worth[own], near[own], EPOCHS_OF_WORTH, half)
        error = (known.of(data.observations[other]) - worth[other]).square() * near[other]
        plain = (worth[other] - worth[own].mean()).square() * near[other]
        print(f"planting: {1 - float(error.sum() / plain.sum()):.3f} of the variance is known",
              flush=True)  # fmt: skip
        estimates.append(known.of(moments.observations))
    found = worth_of_waiting(moments, (estimates[0], estimates[1]))
    save_controller(found.mean, options.out, None, prices(options))


def prices(options: argparse.Namespace) -> dict[str, float | str | None]:
    """What an estimate and a fit must have in common."""
    return {name: getattr(options, name) for name in ("harm", "unit", "ablation")}


def waits_known(data: Gains, options: argparse.Namespace) -> Gains:
    """First decisions know what waiting is worth: as it was measured, or else as an estimate has it
    that was made alike."""
    kept, asked = load_saved(options.waiting), prices(options)
    made = {name: kept.card.get(name) for name in asked}
    if made != asked:
        raise SystemExit(f"{options.waiting} was estimated with {made}; asked for is {asked}")
    assert isinstance(kept.network, TokenActorCritic), "what `waiting` wrote"
    told = torch.zeros_like(data.rule)
    open_ = data.first & ~data.waits
    seen = data.observations[open_]
    told[open_] = options.unit * value_of(kept.network.with_layout(LAYOUT), seen).clamp(min=0.0)
    return data.waiting(told, open_)
