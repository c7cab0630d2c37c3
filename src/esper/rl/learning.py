"""Train in a world, say what that came to, and act: three lines for an environment of Gymnasium's.

A training is made of parts. At the end of each there may be a checkpoint, and the world starts anew
from seeds of its own: where it follows its seed, an interrupted training goes on bit for bit. Late
steps of long episodes would never be seen if a part ended before them: it waits for several ends.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from gymnasium.vector import SyncVectorEnv

from esper.archive import RunKind
from esper.leyline import AgreementError, Legality
from esper.leyline.errors import require_known
from esper.nissa import Hub, RunLayout, RunStarted, RunStore, UpdateMetrics, flatten
from esper.rl.gym_worlds import SAME_STEP, GymWorld, make_gym
from esper.simic.agent import Decision, Outcome, PPOAgent, PPOConfig, collect
from esper.simic.training import RunFolder
from esper.tamiyo import LearnedController

Told = Callable[[PPOAgent, Mapping[str, float]], bool | None]
PARTS, ENDS = 10, 32  # of a training, and episodes of every environment that a part has at least
MEMORY = 128  # size of the LSTM
FEW, FAR = 10_000, 100  # less steps leave no time to learn a memory; longer episodes need more λ
_ANY = PPOConfig(
    learning_rate=1e-3, epochs=10, minibatches=4, entropy_coef=0.01, target_kl=None, gamma=0.99
)
_MEMORY = replace(_ANY, gae_lambda=0.3, sequence=64, learning_rate=4e-3, value_coef=0.1)
# Steps of every environment between updates, and the settings; the reasons are in docs/rl.md.
PRESETS = {
    "reactive": (32, replace(_ANY, gae_lambda=0.9, sequence=8)),
    "memory": (64, _MEMORY),
    "long": (32, replace(_ANY, gae_lambda=0.95, minibatches=2, sequence=32)),
}


def train(
    world: Any,
    steps: int,
    *,
    preset: str = "auto",
    envs: int = 16,
    seed: int = 0,
    out: str | Path | None = None,
    after_update: Told = lambda agent, metrics: None,
    **settings: Any,
) -> PPOAgent:
    """An agent that learned in `world` for about so many steps of all environments together.

    `world`: what `make_gym` takes, or a `VectorWorld`. `settings` are of `PPOConfig`, in place of
    the preset's; rate and entropy bonus fall to nothing. `after_update` sees agent and metrics,
    steps so far and episodes' returns and lengths among them; if it returns true, that is all.
    With `out` telemetry and checkpoints are kept there, and the same call goes on from the last.
    """
    require_known("preset", preset, ("auto", *PRESETS))
    played = world if hasattr(world, "legal") else make_gym(world, envs, seed)
    horizon = getattr(played, "horizon", 0)
    if preset == "auto":
        preset = "reactive" if steps < FEW else "long" if horizon > FAR else "memory"
    rollout, config = PRESETS[preset]
    config, round_, taken, enough = replace(config, **settings), played.envs * rollout, 0, False
    if "minibatches" not in settings:  # few environments have no more than so many sequences
        most = played.envs * (rollout // (config.sequence or rollout))
        config = replace(config, minibatches=max(1, min(config.minibatches, most)))
    sizes = (played.space, played.state_dim, played.envs, rollout, config)
    how: Any = {"direct": True, "seed": seed, "lstm_layers": int(preset != "reactive")}
    agent = PPOAgent.build(*sizes, lstm_hidden_dim=MEMORY, **how)
    if preset == "memory":
        agent.network.remember()
    with ExitStack() as stack:
        run, hub = None if out is None else LearningFolder(out), Hub()
        if run is not None:
            stack.enter_context(run.locked())
            store, agent, rounds = run.last(agent, steps)
            hub, taken = stack.enter_context(Hub(store)), rounds * round_
        for part in range(PARTS):
            goal, tally = -(-steps * (part + 1) // PARTS), Tally(played.envs)
            if taken >= goal or enough:
                continue
            observations = played.reset(part) if isinstance(played, GymWorld) else played.reset()
            agent.begin()
            while taken < (goal if tally.seen(ENDS, horizon) else steps) and not enough:
                rest = 1 - taken / steps
                rate, bonus = rest * config.learning_rate, rest * config.entropy_coef
                agent.anneal(entropy_coef=bonus, learning_rate=rate)
                observations = collect(agent, played, observations, listen=tally.add)
                metrics = agent.update()
                taken += metrics["valid_steps"]
                measured = {"steps": taken, **flatten(metrics), **tally.means()}
                hub.emit(UpdateMetrics(round=taken // round_, metrics=measured))
                enough = bool(after_update(agent, measured))
            hub.commit(taken // round_)
            if run is not None:
                agent.save(run.begin_checkpoint(taken // round_) / "agent")
                run.finish_checkpoint(taken // round_, {}, {})
    return agent


class LearningFolder(RunFolder):
    """Telemetry and checkpoints of a training; `learning.json` has its settings."""

    kind = RunKind.LEARNING

    def last(self, agent: PPOAgent, steps: int) -> tuple[RunStore, PPOAgent, int]:
        """Telemetry, agent and rounds as of the last checkpoint."""
        settings = {"asked": f"steps {steps}, seed {agent.seed}, {agent.config}"}
        if not self.holds_run:
            self.require_fresh(fix="name another directory")
            self.write(self.kind, settings)
        if (held := self.read(self.kind)) != settings:
            what = f"{self.path} holds another training"
            raise AgreementError(what, given=settings["asked"], valid=held.get("asked"))
        self.clear_unfinished()
        store, rounds = RunStore(self.path, RunLayout.of(agent.space)), 0
        if found := self.newest():
            rounds, agent = found[0], PPOAgent.load(self.checkpoint(found[0]) / "agent")
        store.rewind(rounds or -1)
        store.write([RunStarted(round=rounds, config=settings)])
        return store, agent, rounds


class Tally:
    """Returns and lengths of episodes that are over, at most so many of each environment."""

    def __init__(self, envs: int, most: float = inf) -> None:
        self.now, self.most, self.ends = torch.zeros(envs, 2), most, [0] * envs
        self.over: list[list[float]] = []

    def add(self, step: int, decision: Decision | None, outcome: Outcome) -> None:
        self.now += torch.stack((outcome.rewards, torch.ones_like(outcome.rewards)), 1).cpu()
        for env in (outcome.terminals | outcome.truncations).nonzero()[:, 0].tolist():
            self.over += [self.now[env].tolist()] * (self.ends[env] < self.most)
            self.ends[env] += 1
            self.now[env] = 0.0

    def seen(self, ends: float, horizon: int = 0) -> bool:
        """Has every environment had so many, or none any, and no horizon says that there are?"""
        return min(self.ends) >= ends or not (any(self.ends) or horizon)

    def means(self) -> dict[str, float]:
        """What was over since the last time."""
        over, self.over = self.over, []
        names = ("episode_return", "episode_length")
        means = zip(names, map(fmean, zip(*over, strict=True)), strict=False)
        return {"episodes": len(over), **dict(means)}


def evaluate(
    agent: PPOAgent, world: Any, episodes: int = 20, *, greedy: bool = True, seed: int = 10_000
) -> dict[str, float]:
    """Mean return and length of at least so many episodes, and the return's standard error.

    Every environment plays as many as the others, since those that end first are the short ones.
    """
    played = world if hasattr(world, "legal") else make_gym(world, min(episodes, 16), seed)
    chance = torch.Generator(agent.device).manual_seed(seed)
    controller = LearnedController(agent.network, greedy=greedy, generator=chance)
    observations, starts = played.reset(), torch.ones(played.envs, dtype=torch.bool)
    tally = Tally(played.envs, -(-episodes // played.envs))
    while min(tally.ends) < tally.most:
        actions = controller.act(observations, played.legal(), starts)
        tally.add(0, None, outcome := played.step(actions.values))
        observations, starts = outcome.observations, outcome.terminals | outcome.truncations
    spread = stdev(episode[0] for episode in tally.over) if len(tally.over) > 1 else 0.0
    return {"standard_error": spread / len(tally.over) ** 0.5, **tally.means()}


class Player:
    """A trained agent in one environment of Gymnasium's, with its memory and normaliser."""

    def __init__(self, agent: PPOAgent, env: Any, *, greedy: bool = True) -> None:
        self.world = GymWorld(SyncVectorEnv([lambda: env], **SAME_STEP), space=agent.space)
        self.controller = LearnedController(agent.network, greedy=greedy)

    def act(self, observation: Any, mask: Any = None, *, first: bool = False) -> Any:
        """What to do now, as the environment takes it; `first` where an episode begins."""
        seen, legal = self.world.flat(observation)[None], Legality(self.world.space, 1, {})
        if mask is not None:
            legal = self.world.legality([mask])
        return self.world.native(self.controller.act(seen, legal, torch.tensor([first])).values)[0]
