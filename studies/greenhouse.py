"""Learning in the greenhouse in two steps: first what planting gains, then when, by PPO.

    python -m studies.greenhouse collect --out gains --plots 200 --device cuda
    python -m studies.greenhouse fit --gains gains --out fitted
    python -m studies.greenhouse train --out trained --start fitted --rounds 50 --device cuda

`collect` plays drawn worlds: of every case a control, some random schedules of up to three seeds,
and the rule `audition`. What they gained over the control is kept with what was seen when they
decided, in compressed parts of a few plots each; parts that are there are not played again. `fit`
ranks the choices of every case by their gains. `train` goes on from there with PPO; killed, it goes
on from its last round. Nothing here needs more than torch, numpy and safetensors.

Shapes: `C` cases, `K` choices of a case, the control the first of them, `F` features, `H` heads.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator, default_rng
from torch import Tensor
from torch.nn.functional import logsigmoid

from esper.archive import read_archive, write_archive, write_whole
from esper.garden import LAYOUT, Bed, Greenhouse, Plot, Plots
from esper.garden.dealing import ALONE, Ranks
from esper.leyline import Actions, Blend, Legality, LifecycleOp
from esper.leyline.streams import derive_seed
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.agent.rollouts import collect as play_round
from esper.simic.agent.types import Decision, Outcome
from esper.simic.training.run_processes import joined
from esper.tamiyo import MaskedCategorical, TokenActorCritic, logits_given
from esper.tamiyo.controllers import RowSchedule
from esper.tamiyo.controllers.specs import Arm

SCHEDULES = 6  # random ones of every case
PLOTS_OF_PART = 8
MOST_SEEDS = 3
EARLIEST, LATEST = 4, 9  # epochs before the first seed; shadows are heard meanwhile
LEAST_LEFT = 7  # epochs after it
HEADS = ("op", "slot", "blueprint", "blend")  # whose masks are kept
CLEAR = 0.05  # difference of two gains, in units of their scale, that is no noise
KIND, VERSION = "fitted gains", 1


# --- gains ----------------------------------------------------------------------------------------


class Gains(NamedTuple):
    """What came of cases."""

    observations: Tensor  # [C, F] when the first seed was to be planted
    masks: dict[str, Tensor]  # what was legal then, by head
    actions: Tensor  # [C, K, H] what was decided then: the control, schedules, the rule
    gains: Tensor  # [C, K] net points over the control
    scale: Tensor  # [C]
    plot: Tensor  # [C] its number

    @classmethod
    def load(cls, folder: Path) -> "Gains":
        parts = [np.load(file) for file in sorted(folder.glob("gains-*.npz"))]
        if not parts:
            raise SystemExit(f"{folder} has no parts of gains: collect them first")
        names = [name for name in cls._fields if name != "masks"]
        whole = {name: _joined(parts, name) for name in names}
        return cls(masks={head: _joined(parts, f"mask_{head}") for head in HEADS}, **whole)

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Gains":
        return Gains(
            observations=change(self.observations),
            masks={head: change(mask) for head, mask in self.masks.items()},
            actions=change(self.actions),
            gains=change(self.gains),
            scale=change(self.scale),
            plot=change(self.plot),
        )

    def rows(self, index: Tensor) -> "Gains":
        return self.changed(lambda part: part[index])


def _joined(parts: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    whole = torch.from_numpy(np.concatenate([part[name] for part in parts]))
    if whole.dtype is torch.int16:
        return whole.long()
    return whole.float() if whole.is_floating_point() else whole


def measure(plot: Plot, number: int, schedules: int, device: str) -> dict[str, Any]:
    """What random schedules and the rule gain in the cases of a plot."""
    bed = Bed(plot, schedules + 1, device=device)
    chance = default_rng(derive_seed("gains", plot.name))
    decides = min(int(chance.integers(EARLIEST, LATEST + 1)), plot.horizon - LEAST_LEFT)
    rows = bed.players.view(-1, schedules + 1)  # [C, K - 1], the rule last
    plans: list[tuple[Arm, ...]] = [()] * len(bed.players)
    for row in rows[:, :-1].flatten().tolist():
        plans[row] = _schedule(chance, bed, decides)
    player, starts = RowSchedule(plans), torch.ones(len(bed.players), dtype=torch.bool)
    seen: dict[str, Tensor] = {}
    for epoch in range(plot.horizon):
        signals = bed.episodes.signals().rows(bed.players)
        values = player.act(signals, bed.episodes.legal().rows(bed.players), starts).values
        values[rows[:, -1]] = bed.advice.values[rows[:, -1]]
        if epoch == decides:
            seen = {f"mask_{head}": bed.legal.masks[head][rows[:, 0]] for head in HEADS}
            seen["observations"] = bed.observations[rows[:, 0]].half()
            seen["actions"] = torch.cat([torch.zeros(len(rows), 1, 4), values[rows]], 1).short()
        bed.step(values)
        starts = torch.zeros_like(starts)
    net = (bed.state.objective - plot.rent * bed.state.exposure)[rows]
    seen["gains"] = torch.cat([torch.zeros(len(rows), 1), net], 1).float()
    seen["scale"] = torch.tensor([context.scale for context in plot.contexts])
    seen["plot"] = torch.full((len(rows),), number).short()
    return {name: each.cpu().numpy() for name, each in seen.items()}


def _schedule(chance: Generator, bed: Bed, first: int) -> tuple[Arm, ...]:
    """Up to three seeds that fit, in different slots, one after the other."""
    population = bed.episodes.population
    catalogue, budget = population.catalogue, int(population.budget[0])
    costs = catalogue.total_costs()[:, :, Blend.IMMEDIATE]
    fitting = ((costs >= 0) & (costs <= budget)).nonzero().tolist()
    if not fitting:
        return ()
    arms: dict[int, Arm] = {}
    epoch = first
    for _ in range(int(chance.integers(1, MOST_SEEDS + 1))):
        slot, kind = fitting[int(chance.integers(len(fitting)))]
        blend = list(Blend)[int(chance.integers(len(Blend)))].name.lower()
        names = {"slot": catalogue.slots.names[slot], "blueprint": catalogue.names[kind]}
        arms.setdefault(slot, Arm(**names, blend=blend, epoch=epoch))
        epoch += int(chance.integers(1, 5))
    return tuple(arms.values())


def collect(options: argparse.Namespace, ranks: Ranks = ALONE) -> None:
    """Parts that are missing, one after the other; `ranks` take turns."""
    options.out.mkdir(parents=True, exist_ok=True)
    house, until = Greenhouse(options.seed, longest=options.longest), _deadline(options)
    parts = range(0, options.plots, PLOTS_OF_PART)
    for first in parts[ranks.rank :: ranks.size]:
        file = options.out / f"gains-{first:06d}.npz"
        if file.exists():
            continue
        if time.monotonic() > until:
            print(f"stopped before plot {first}; the same command goes on")
            return
        began, found = time.monotonic(), []
        for number in range(first, min(first + PLOTS_OF_PART, options.plots)):
            plot = house.plot(number, options.cases)
            found.append(measure(plot, number, options.schedules, options.device))
        whole: Any = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
        half = file.with_name(f"half-{file.name}")  # which loading does not take for a part
        np.savez_compressed(half, **whole)
        os.replace(half, file)
        best = whole["gains"][:, 1:-1].max(1).mean()
        print(
            f"{file.name}: {len(whole['gains'])} cases, best schedule {best:+.1f} points, rule "
            f"{whole['gains'][:, -1].mean():+.1f}, {file.stat().st_size / 2**20:.2f} MB, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )


# --- fitting --------------------------------------------------------------------------------------


def choice_scores(network: TokenActorCritic, data: Gains) -> Tensor:
    """[C, K - 1]: log-probs of the choices but the rule's, as the network decides at first."""
    logits = network(data.observations, None).logits
    found = []
    for actions in data.actions[:, :-1].unbind(1):
        legal = Legality(LAYOUT.space, len(actions), data.masks)
        chosen = Actions(LAYOUT.space, actions.cpu()).canonical().values.to(actions.device)
        masks = legal.resolved(chosen)
        chances = MaskedCategorical(logits_given(logits, LAYOUT.space, chosen), masks, False)
        found.append(chances.log_prob(chosen).sum(-1))
    return torch.stack(found, 1)


def ranking_loss(scores: Tensor, data: Gains) -> Tensor:
    """Of every two choices of a case, the one that gained clearly more should be likelier."""
    worth = (data.gains / data.scale[:, None]).clamp(-2.0, 2.0)[:, :-1]  # the rule may wait first
    ahead = worth[:, :, None] - worth[:, None, :]  # [C, K, K]
    apart = scores[:, :, None] - scores[:, None, :]
    weight = ahead.clamp(min=0.0) * (ahead > CLEAR) * _open(data)
    return -(weight * logsigmoid(apart)).sum() / weight.sum().clamp(min=1e-6)


def _open(data: Gains) -> Tensor:
    """[C, K, K] bool: both choices were planted when they were to be, or are the control."""
    planted = data.actions[:, :-1, 0] == LifecycleOp.GERMINATE
    planted[:, 0] = True
    return planted[:, :, None] & planted[:, None, :]


def figures_of(network: TokenActorCritic, data: Gains) -> dict[str, float]:
    """Points that the likeliest of the measured choices gains, against others."""
    with torch.no_grad():
        scores = choice_scores(network, data)
        gains = data.gains[:, :-1]
        open_ = _open(data)[:, 0]
        likeliest = scores.masked_fill(~open_, -torch.inf).argmax(1, keepdim=True)
        return {
            "loss": float(ranking_loss(scores, data)),
            "chosen": float(gains.gather(1, likeliest).mean()),
            "best": float(gains.masked_fill(~open_, 0.0).amax(1).mean()),
            "random": float(gains[:, 1:][open_[:, 1:]].mean()),
            "rule": float(data.gains[:, -1].mean()),
            "cases": float(len(gains)),
        }


def fit(options: argparse.Namespace) -> None:
    """Fit the network's preferences; every eighth plot is kept apart."""
    data = Gains.load(options.gains)
    apart = data.plot % 8 == 7
    both = (data.rows(where.nonzero()[:, 0]) for where in (~apart, apart))
    train, held = (part.changed(lambda each: each.to(options.device)) for part in both)
    torch.manual_seed(derive_seed(options.seed, "fit"))
    network = TokenActorCritic(LAYOUT).to(options.device)
    optimiser = torch.optim.AdamW(network.parameters(), lr=options.rate, weight_decay=0.01)
    chance = torch.Generator().manual_seed(derive_seed(options.seed, "order"))
    best, kept = float("inf"), {}
    for epoch in range(options.epochs):
        for index in torch.randperm(len(train.gains), generator=chance).split(options.batch):
            rows = train.rows(index.to(options.device))
            optimiser.zero_grad()
            ranking_loss(choice_scores(network, rows), rows).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
        judged = figures_of(network, held if len(held.gains) else train)
        print(f"epoch {epoch}: " + ", ".join(f"{k} {v:.3f}" for k, v in judged.items()), flush=True)
        if judged["loss"] < best:
            best, notes = judged["loss"], judged
            kept = {
                name: each.detach().cpu().clone() for name, each in network.state_dict().items()
            }
    write_archive(options.out, kind=KIND, version=VERSION, tensors=kept, notes=notes)


# --- PPO ------------------------------------------------------------------------------------------


class Paid:
    """The sum of a round's rewards."""

    def __init__(self, envs: int) -> None:
        self.total = torch.zeros(envs)

    def __call__(self, step: int, decision: Decision, outcome: Outcome) -> None:
        self.total += outcome.rewards

    @property
    def mean(self) -> float:
        return float(self.total.mean())


def train(options: argparse.Namespace) -> None:
    """Rounds of PPO, from fitted preferences or from the rule; the same command goes on."""
    options.out.mkdir(parents=True, exist_ok=True)
    state, agent_at = options.out / "state.json", options.out / "agent"
    own = derive_seed(options.seed, "ppo")  # other worlds than those that gains were collected in
    house = Greenhouse(own, longest=options.longest)
    how = {"plots": options.plots, "players": options.players, "device": options.device}
    world = Plots(house, options.envs, **how)
    config = PPOConfig(learning_rate=options.rate, epochs=4, minibatches=options.minibatches)
    done = json.loads(state.read_text()) if state.exists() else []
    if done:
        agent = PPOAgent.load(agent_at / f"round-{len(done)}", device=options.device)
        seen = world.load_state_dict({"number": torch.full((options.envs,), len(done))})
    else:
        sizes = (LAYOUT.space, LAYOUT.state_dim, options.envs, options.longest, config)
        made = {"layout": LAYOUT, "seed": options.seed, "device": options.device}
        agent = PPOAgent.build(*sizes, **made)
        if options.start is not None:
            fitted = read_archive(options.start, kind=KIND, version=VERSION)
            agent.network.load_state_dict(fitted.tensors)
        seen = world.reset()
    until = _deadline(options)
    while len(done) < options.rounds and time.monotonic() < until:
        began, paid = time.monotonic(), Paid(options.envs)
        seen = play_round(agent, world, seen, listen=paid)
        played = time.monotonic() - began
        metrics = agent.update()
        done.append({"return": paid.mean, "kl": metrics["kl"], "play": played})
        print(f"round {len(done)}: return {paid.mean:+.3f}, {played:.0f} s", flush=True)
        agent.save(agent_at / f"round-{len(done)}")
        write_whole(state, json.dumps(done))


def _deadline(options: argparse.Namespace) -> float:
    return time.monotonic() + (options.seconds or float("inf"))


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    top = argparse.ArgumentParser(prog="python -m studies.greenhouse")
    parts = top.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--device", default="cpu")
    common.add_argument("--out", type=Path, required=True)
    common.add_argument("--longest", type=int, default=60, help="epochs of an episode")
    common.add_argument("--seconds", type=float, help="stop at the next safe point after so many")
    one = parts.add_parser("collect", parents=[common])
    one.add_argument("--plots", type=int, default=200)
    one.add_argument("--cases", type=int, default=8, help="worlds of every plot")
    one.add_argument("--schedules", type=int, default=SCHEDULES, help="random ones of every case")
    two = parts.add_parser("fit", parents=[common])
    two.add_argument("--gains", type=Path, required=True)
    two.add_argument("--epochs", type=int, default=30)
    two.add_argument("--batch", type=int, default=128, help="cases")
    two.add_argument("--rate", type=float, default=1e-3)
    three = parts.add_parser("train", parents=[common])
    three.add_argument("--start", type=Path, help="what `fit` wrote")
    three.add_argument("--rounds", type=int, default=50)
    three.add_argument("--envs", type=int, default=1024)
    three.add_argument("--plots", type=int, default=16)
    three.add_argument("--players", type=int, default=4)
    three.add_argument("--minibatches", type=int, default=8)
    three.add_argument("--rate", type=float, default=3e-4)
    for part, work in ((one, collect), (two, fit), (three, train)):
        part.set_defaults(work=work)
    return top.parse_args(words)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = parsed()
    with joined(asked.device) as processes:
        if asked.work is collect:
            collect(asked, processes)
        elif processes.rank == 0:  # on many processes, `esper train` learns
            asked.work(asked)
