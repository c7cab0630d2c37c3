"""Learning in the greenhouse in two steps: first what planting gains, then when, by PPO.

    python -m studies.greenhouse collect --out gains --plots 400 --device cuda
    python -m studies.greenhouse fit --gains gains --out fitted
    python -m studies.greenhouse listen --out moments --plots 400
    python -m studies.greenhouse waiting --gains gains --moments moments --fitted fitted/best \\
        --out waiting
    python -m studies.greenhouse fit --gains gains --waiting waiting --out again
    python -m studies.greenhouse train --out trained --fitted again/best --rounds 50 --device cuda
    python -m studies.greenhouse judge audition again/best --out judged --group validation

`collect` plays drawn worlds. Of every case a control, the rule `audition`, four seeds planted at
one moment, one row that waits, and three seeds planted later beside the first of them. What they
gained is kept with what was seen when they were planted, in compressed parts of a few plots each.
`fit` learns from that which seed to prefer, and whether to plant it now. `listen` keeps what is
seen while nothing is planted, by which `waiting` says what it is worth to wait; a fit that knows it
plants later, or not at all, where that is better. `train` goes on from there with PPO. `judge`
plays controllers on the same cases of worlds that none of them learned from, and `pack` makes one
small file of gains or moments. What is there is not made again, so each command goes on where it
was stopped; `--place 2 --of 8` makes the third of eight shares. Nothing here needs more than torch,
numpy and safetensors.

Shapes: `D` decisions, `K` choices of one, waiting the first of them, `A` anchors, `F` features.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.hooks import RemovableHandle

from esper.archive import read_archive, write_archive, write_whole
from esper.distributed import Processes
from esper.garden import LAYOUT, Greenhouse, Plots
from esper.garden.reward_settings import RewardConfig
from esper.leyline import LifecycleOp
from esper.leyline.streams import derive_seed
from esper.simic.agent.ppo import PPOAgent, initial_weights
from esper.simic.agent.ppo_config import PPOConfig
from esper.simic.agent.rollout import collect as collect_rollout
from esper.simic.agent.types import Decision, Outcome
from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers.learned import load_saved, save_controller
from esper.tamiyo.token_layout import ADVISED
from studies.ablations import ABLATION, SEEN, ablated
from studies.averaged import DECAY, DROPOUT, RATE, Averaged, decode_without_memory
from studies.garden_plots import GARDEN_SEED
from studies.greenhouse_gains import Anchors, Gains, collect, deadline, pack
from studies.judging import JUDGED, judge
from studies.listening import listen
from studies.preferences import Preferences
from studies.waiting import estimate_waiting, prices, waits_known

CLEAR = 0.05  # difference of what two seeds are worth that is no noise
KIND, VERSION = "fit of gains", 4
DONE = "done.json"  # figures of a fit's epochs


# --- fitting --------------------------------------------------------------------------------------


class Fitting(Averaged):
    """Learns from gains. The rule has no say at first on what to plant, but that its advice is
    seen: what gains more is known better."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.harm, self.unit = options.harm, options.unit
        super().__init__(options.seed, options.device, options.rate, options.decay, options.dropout)

    def prepare(self) -> None:
        with torch.no_grad():
            rule_logit_scale = self.network.rule_logit_scale
            rule_logit_scale["op"][[LifecycleOp.WAIT, LifecycleOp.GERMINATE]] = 0.0
            rule_logit_scale["slot"][LifecycleOp.GERMINATE] = 0.0
            rule_logit_scale["seed"].zero_()

    def losses(self, network: TokenActorCritic, data: Gains, anchors: Anchors) -> dict[str, Tensor]:
        count, worth = len(data.gains), data.worth(self.harm, self.unit)
        observations = torch.cat((data.observations, anchors.observations))
        logits, _ = decode_without_memory(network, observations)
        data_logits = {head: head_logits[:count] for head, head_logits in logits.items()}
        preferred = Preferences.of(data_logits, data)
        legal = logits["op"][count:].masked_fill(~anchors.mask, -1e9)
        tended = cross_entropy(legal, anchors.op, reduction="sum") / max(1, len(legal))
        return {"rank": ranking_loss(preferred.scores, data.worth(0.0, self.unit)[:, 1:]),
                "plant": planting_loss(preferred, worth), "tend": tended,
                "leave": leaving_loss(data_logits["op"], data)}  # fmt: skip

    def learn(self, data: Gains, anchors: Anchors) -> None:
        self.step(torch.stack(list(self.losses(self.network, data, anchors).values())).sum())


def ranking_loss(scores: Tensor, worth: Tensor) -> Tensor:
    """Of every two seeds of a decision, the one that gained clearly more should be likelier."""
    ahead = worth[:, :, None] - worth[:, None, :]  # [D, K, K]; NaN: not both were planted
    apart = scores[:, :, None] - scores[:, None, :]
    weight = torch.where(ahead > CLEAR, ahead, 0.0)
    return -(weight * logsigmoid(apart)).sum() / weight.sum().clamp(min=1e-6)


def planting_loss(preferred: Preferences, worth: Tensor) -> Tensor:
    """Planting should be likelier than waiting where what it prefers is worth more: what was tried
    tells that as far as it is what would be planted."""
    liked = preferred.liked(~worth[:, 1:].isnan())
    value = (worth[:, 1:].gather(1, liked) - worth[:, :1])[:, 0].nan_to_num(0.0)  # [D]
    weight = value.abs() * preferred.near.gather(1, liked)[:, 0]
    rather = logsigmoid(preferred.op * value.sign())
    return -(weight * rather).sum() / weight.sum().clamp(min=1e-6)


def leaving_loss(op: Tensor, data: Gains) -> Tensor:
    """Where the rule has nothing to tend, what grows is let alone: `op` [D, ops] is to be to plant
    or to wait."""
    plain = [LifecycleOp.WAIT, LifecycleOp.GERMINATE]
    advised = LAYOUT.split(data.observations)[0][:, -ADVISED[0] :]
    quiet = advised[:, plain].sum(1)
    legal = op.masked_fill(~data.masks["op"], -1e9)
    tends = legal.logsumexp(1) - legal[:, plain].logsumexp(1)
    return (quiet * tends).sum() / quiet.sum().clamp(min=1.0)


@torch.no_grad()
def figures_of(fitting: Fitting, data: Gains, anchors: Anchors) -> dict[str, float]:
    """Losses, and points that decisions gain: the network's where it was tried out what it would
    plant, and others'. Behind `first_` of those that come first in an episode. Waiting has what is
    known of it: nothing, or an estimate, with the price of harm; who waits is not harmed here."""
    losses = fitting.losses(fitting.mean, data, anchors)
    found = {name: float(loss) for name, loss in losses.items()}
    logits, _ = decode_without_memory(fitting.mean, data.observations)
    preferred = Preferences.of(logits, data)
    first = data.first
    gains, there = data.gains[:, 1:], ~data.gains[:, 1:].isnan()
    liked = preferred.liked(there)
    waited, planted = data.gains[:, 0], gains.gather(1, liked)[:, 0]
    near = preferred.near.gather(1, liked)[:, 0] * there.any(1)
    planted = planted.nan_to_num(0.0)
    chosen = torch.where(preferred.op > 0, planted, waited)
    for kind, weight in (("first_", near * first), ("later_", near * ~first)):
        told = {"chosen": chosen, "liked": planted, "waited": waited,
                "planted": (preferred.op > 0).float(),
                "harmed": data.harmed(chosen).float()}  # fmt: skip
        for name, each in told.items():
            found[kind + name] = float((weight * each).sum() / weight.sum().clamp(min=1e-6))
        found[kind + "decisions"] = float(weight.sum())
    return found | {"random": float(gains[there].mean()), "rule": float(data.rule.nanmean())}


def _lost(figures: Mapping[str, float]) -> float:
    return figures["rank"] + figures["plant"] + figures["leave"]


def _apart(plot: Tensor) -> tuple[Tensor, Tensor]:
    """The places of what is learned from, and of what judges: the same if there is very little."""
    held = plot % 8 == 7
    learned = (~held).nonzero()[:, 0]
    return learned, held.nonzero()[:, 0] if bool(held.any()) else learned


def fit(options: argparse.Namespace) -> None:
    """Fit the network's preferences; every eighth plot is kept apart. The same command goes on."""
    data, anchors = Gains.load(options.gains), Anchors.load(options.gains)
    data, anchors = ablated(options.ablation, data), ablated(options.ablation, anchors)
    if options.waiting is not None:
        data = waits_known(data, options)
    elif options.hasty:
        data = data.waiting(torch.zeros_like(data.rule), data.first)
    if options.contexts:
        some, few = ((each.plot < options.contexts) | (each.plot % 8 == 7)
                     for each in (data, anchors))  # fmt: skip
        data, anchors = data.rows(some.nonzero()[:, 0]), anchors.rows(few.nonzero()[:, 0])
    there = lambda each: each.to(options.device)  # noqa: E731
    data, anchors = data.changed(there), Anchors(*map(there, anchors))
    train, held = (data.rows(where) for where in _apart(data.plot))
    tended, looked = (anchors.rows(where) for where in _apart(anchors.plot))
    fitting = Fitting(options)
    made = prices(options) | {"contexts": options.contexts, "waiting": None}
    made |= {"hasty": options.hasty}
    if options.waiting is not None:
        made["waiting"] = load_saved(options.waiting).controller().fingerprint
    at, state, done = options.out / "best", options.out / "state", list[dict[str, float]]()
    if state.exists():
        saved = read_archive(state, kind=KIND, version=VERSION)
        if saved.notes["made"] != made:
            raise SystemExit(f"{state} was fitted with {saved.notes['made']}; asked for is {made}")
        fitting.restore(saved)
        done = list(saved.notes["done"])
    until = deadline(options)
    while len(done) < options.epochs and time.monotonic() < until:
        torch.manual_seed(derive_seed(options.seed, "dropout", len(done)))
        chance = torch.Generator().manual_seed(derive_seed(options.seed, "order", len(done)))
        for index in torch.randperm(len(train.gains), generator=chance).split(options.batch):
            known = len(tended.op)  # there may be none in very little
            few = torch.randint(max(known, 1), (min(known, 1) * options.batch,), generator=chance)
            fitting.learn(train.rows(index.to(options.device)), tended.rows(few.to(options.device)))
        figures = figures_of(fitting, held, looked)
        done.append(figures)
        told = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        print(f"epoch {len(done)}: {told}", flush=True)
        if _lost(figures) == min(map(_lost, done)):
            lacks = {ABLATION: options.ablation} if options.ablation else {}
            save_controller(fitting.mean, at, None, {"figures": figures, **lacks})
        notes = {"done": done, "made": made}
        write_archive(state, kind=KIND, version=VERSION, tensors=fitting.tensors(), notes=notes)
        write_whole(options.out / DONE, json.dumps(done))


# --- PPO ------------------------------------------------------------------------------------------


class Paid:
    """The sum of a round's rewards."""

    def __init__(self, envs: int) -> None:
        self.total = torch.zeros(envs)

    def __call__(self, step: int, decision: Decision, outcome: Outcome) -> None:
        self.total += outcome.rewards

    def mean(self, processes: Processes) -> float:
        """Of all rows of all processes."""
        total, count = processes.sum_(
            torch.stack((self.total.sum(), torch.tensor(len(self.total))))
        )
        return float(total / count)


def _together() -> Processes:
    """The processes that torchrun started, or this one; several may share a device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    torch.distributed.init_process_group("gloo")
    return Processes.from_default_group()


def _hold_policy(network: torch.nn.Module) -> list[RemovableHandle]:
    """Let only the value learn: what is fitted should not follow a value that knows nothing."""
    return [each.register_hook(torch.zeros_like)
            for name, each in network.named_parameters()
            if not name.startswith("value_head")]  # fmt: skip


def train(options: argparse.Namespace) -> None:
    """Rounds of PPO, from fitted preferences or from the rule; the same command goes on."""
    options.out.mkdir(parents=True, exist_ok=True)
    state, agent_at = options.out / "state.json", options.out / "agent"
    processes, own = _together(), derive_seed(options.seed, "ppo")  # other worlds than of gains
    house, envs = Greenhouse(own, longest=options.longest), options.envs // processes.size
    how: dict[str, Any] = {"reward": RewardConfig(caution=options.caution)}
    how |= {"plots": options.plots // processes.size, "players": options.players}
    how |= {"place": processes.rank, "of": processes.size}
    world = Plots(house, envs, device=options.device, **how)
    config = PPOConfig(lr=options.rate, entropy_coef=options.entropy, epochs=4,
                       minibatches=options.minibatches)  # fmt: skip
    done = json.loads(state.read_text()) if state.exists() else []
    where: Any = {"device": options.device, "processes": processes}
    if done:
        agent = PPOAgent.load(agent_at / f"round-{len(done)}", **where)
        seen = world.load_state_dict({"number": torch.full((envs,), len(done))})
    else:
        with initial_weights(options.seed):
            network = TokenActorCritic(LAYOUT)
        agent = PPOAgent(
            network=network.to(options.device),
            num_envs=envs,
            max_steps_per_env=options.longest,
            config=config,
            seed=options.seed,
            processes=processes,
        )
        if options.fitted is not None:
            agent.network.load_state_dict(load_saved(options.fitted).network.state_dict())
        seen = world.reset()
    until = deadline(options)
    while len(done) < options.rounds:
        if processes.max_int(time.monotonic() > until, torch.device("cpu")):
            break
        began, paid = time.monotonic(), Paid(envs)
        seen = collect_rollout(agent, world, seen, on_step=paid)
        played = time.monotonic() - began
        held = _hold_policy(agent.network) if len(done) < options.warm else []
        metrics, worth = agent.update(), paid.mean(processes)
        for each in held:
            each.remove()
        done.append({"return": worth, "kl": metrics["kl"], "play": played})
        done[-1]["learn"] = time.monotonic() - began - played
        agent.save(agent_at / f"round-{len(done)}")
        if processes.rank:
            continue
        print(f"round {len(done)}: " + ", ".join(f"{k} {v:.3g}" for k, v in done[-1].items()),
              flush=True)  # fmt: skip
        write_whole(state, json.dumps(done))
        if len(done) > 1:
            shutil.rmtree(agent_at / f"round-{len(done) - 1}")
        save_controller(agent.network, options.out / "last", None, {"rounds": len(done)})


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    top = argparse.ArgumentParser(prog="python -m studies.greenhouse")
    parts = top.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--seed", type=int, default=0, help=f"from {GARDEN_SEED} on: gains in the garden"
    )
    common.add_argument("--device", default="cpu")
    common.add_argument("--out", type=Path, required=True)
    common.add_argument("--longest", type=int, default=60, help="epochs of an episode")
    # torchrun says it in the environment.
    place, of = (int(os.environ.get(name, each)) for name, each in (("RANK", 0), ("WORLD_SIZE", 1)))
    common.add_argument("--place", type=int, default=place, help="which share of the work")
    common.add_argument("--of", type=int, default=of, help="how many shares there are")
    common.add_argument("--seconds", type=float, help="stop at the next safe point after so many")
    one = parts.add_parser("collect", parents=[common])
    one.add_argument("--plots", type=int, default=400)
    one.add_argument("--cases", type=int, default=16, help="worlds of every plot")
    one.add_argument("--fitted", type=Path, help="what `fit` wrote: seeds that it likes are tried")
    two = parts.add_parser("fit", parents=[common])
    known = two.add_mutually_exclusive_group()
    known.add_argument("--waiting", type=Path, help="what `waiting` wrote")
    known.add_argument("--hasty", action="store_true", help="take waiting for never planting")
    two.add_argument("--contexts", type=int, help="learn from the first so many plots only")
    two.add_argument("--decay", type=float, default=DECAY, help="of weights")
    two.add_argument("--dropout", type=float, default=DROPOUT)
    two.add_argument("--epochs", type=int, default=24)
    two.add_argument("--batch", type=int, default=1024, help="decisions")
    two.add_argument("--rate", type=float, default=RATE)
    three = parts.add_parser("train", parents=[common])
    three.add_argument("--fitted", type=Path, help="what `fit` wrote")
    three.add_argument("--rounds", type=int, default=50)
    three.add_argument("--envs", type=int, default=1024)
    three.add_argument("--plots", type=int, default=16)
    three.add_argument("--players", type=int, default=4)
    three.add_argument("--minibatches", type=int, default=8)
    three.add_argument("--rate", type=float, default=3e-4)
    three.add_argument("--entropy", type=float, default=0.05, help="weight of its bonus")
    three.add_argument("--warm", type=int, default=0, help="rounds in which only the value learns")
    three.add_argument("--caution", type=float, default=1.0, help="how much more a loss counts")
    four = parts.add_parser("judge", parents=[common])
    four.add_argument("controllers", nargs="+", help="specs, or kept ones: FOLDER, name=FOLDER")
    four.add_argument("--group", nargs="+", default=["validation"], help=", ".join(JUDGED))
    four.add_argument("--final", action="store_true", help="held-out groups too")
    four.add_argument("--first", type=int, default=0, help="world")
    four.add_argument("--worlds", type=int, help="as many as are registered if not said")
    four.add_argument("--cases", type=int, default=16)
    four.add_argument("--rows", type=int, default=256, help="that train at once")
    five = parts.add_parser("pack", parents=[common])
    five.add_argument("--gains", type=Path, nargs="+", required=True)
    six = parts.add_parser("listen", parents=[common])
    six.add_argument("--plots", type=int, default=400)
    six.add_argument("--cases", type=int, default=24, help="worlds of every plot")
    seven = parts.add_parser("waiting", parents=[common])
    seven.add_argument("--fitted", type=Path, required=True, help="what `fit` wrote: it chooses")
    seven.add_argument("--moments", type=Path, nargs="+", required=True, help="of `listen`")
    for part in (two, seven):
        part.add_argument("--ablation", choices=SEEN, help="what it does not see, nor will later")
        part.add_argument("--gains", type=Path, nargs="+", required=True)
        part.add_argument(
            "--harm", type=float, default=8.0, help="points that ending in harm costs"
        )
        part.add_argument(
            "--unit", type=float, default=12.0, help="points that count as 1, 2 at most"
        )
    works = (collect, fit, train, judge, pack, listen, estimate_waiting)
    every = (one, two, three, four, five, six, seven)
    for part, work in zip(every, works, strict=True):
        part.set_defaults(work=work)
    return top.parse_args(words)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = parsed()
    if asked.work is not fit or asked.place == 0:
        asked.work(asked)
