"""From transitions to events: what the loop tells the world.

Shapes: `N` environments, `S` slots, `M` changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from esper.garden.environment import Garden, Transition
from esper.garden.rewards import net_of_rent
from esper.leyline import NOTHING, Cause, SeedStage
from esper.leyline.constants import SCORED_EPOCHS
from esper.nissa import (
    AnomalyFound,
    Decisions,
    EpisodeEnded,
    Event,
    Hub,
    LifecycleChanged,
    Refused,
    RolledBack,
    Stepped,
)
from esper.simic.agent.types import Decision
from esper.tamiyo import MaskedCategorical, RecurrentActorCritic, logits_given

SLOW = 1.5  # times as long as the others, in the middle
PATIENCE = 5  # rounds in a row


class Waiting(Hub):
    """The hub of a process that is not the first: events wait until that one takes them."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Event] = []

    def emit(self, event: Event) -> None:
        self._waiting.append(event)

    def taken(self) -> list[Event]:
        """All since the last time."""
        taken, self._waiting = self._waiting, []
        return taken


@dataclass
class SlowRank:
    """Finds a process that all others wait for, round after round."""

    rank: int | None = None
    rounds: int = 0  # in a row

    def observe(self, round_: int, seconds: Sequence[float]) -> tuple[AnomalyFound, ...]:
        """By rank, how long a round's episodes took."""
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = sorted(each for rank, each in enumerate(seconds) if rank != slowest)
        times = seconds[slowest] / max(1e-9, others[len(others) // 2]) if others else 0.0
        rank = slowest if times > SLOW else None
        self.rounds = self.rounds + 1 if rank == self.rank else 1
        self.rank = rank
        if rank is None or self.rounds != PATIENCE:
            return ()
        return (
            AnomalyFound(
                round=round_,
                name="slow_rank",
                head="",
                raised=True,
                seen=times,
                threshold=SLOW,
                updates=PATIENCE,
                message=f"Rank {rank} has taken {times:.1f} times as long as the others to play, "
                f"{PATIENCE} rounds in a row; all wait for it.",
                advice="Look at what else its machine computes, or leave it out.",
            ),
        )


@dataclass
class Reporter:
    """Tells a hub what happens in one process's environments."""

    hub: Hub
    network: RecurrentActorCritic
    garden: Garden
    first_env: int  # the number of this process's first environment
    watched: int

    def step(
        self, round_: int, step: int, decision: Decision, transition: Transition, returns: Tensor
    ) -> Callable[[], None]:
        """What is returned tells all that a step decided and did; `returns` [N] of episodes so far.

        What lies on a device is fetched at once, so that telling waits for nothing there.
        """
        count = max(0, self.watched - self.first_env)  # of the first environments of the run
        decisions = Decisions(
            round=round_,
            step=step,
            actions=transition.actions.values,
            values=decision.values.cpu(),
            log_probs=decision.log_probs.cpu(),
            observations=decision.states[:count].cpu() if count else None,
            masks=decision.masks[:count].cpu() if count else None,
            probabilities=self._probabilities(decision, count) if count else None,
            active=transition.active,
            first_env=self.first_env,
        )
        return partial(self._tell, decisions, transition, returns, count)

    def _tell(
        self, decisions: Decisions, transition: Transition, returns: Tensor, count: int
    ) -> None:
        when = {"round": decisions.round, "step": decisions.step}
        self.hub.emit(decisions)
        self._refusals(when, transition, count)
        life = transition.after.lifecycle
        slots = self.garden.catalogue.slots.names
        alphas = {f"alpha_{name}": life.alpha[:, place] for place, name in enumerate(slots)}
        self.hub.emit(
            Stepped(
                **when,
                rewards=transition.terms.total,
                terms=dict(transition.terms),
                measures={
                    "accuracy": transition.epoch.accuracy,
                    "committed": transition.epoch.committed,
                    "added": transition.epoch.added,
                    **alphas,
                },
                active=transition.active,
                first_env=self.first_env,
            )
        )
        self._changes(when, transition)
        self._endings(when, transition, returns)

    @torch.no_grad()
    def _probabilities(self, decision: Decision, count: int) -> Tensor:
        """[W, H, A]: of every action, for the first `count` environments."""
        memory = (decision.hidden[0][:, :count], decision.hidden[1][:, :count])
        outlook = self.network(decision.states[:count], memory)
        logits = logits_given(outlook.logits, self.network.space, decision.actions[:count])
        return MaskedCategorical(logits, decision.masks[:count], validate=False).probs.cpu()

    def _refusals(self, when: Mapping[str, int], transition: Transition, count: int) -> None:
        """What gates kept the first `count` environments from; those that end are others now."""
        (rows,) = (transition.epoch.active & ~transition.terminals)[:count].nonzero(as_tuple=True)
        found = self.garden.episodes.population.refusals(transition.before.lifecycle, rows)
        if found:
            place, slot, op, reason = zip(*found, strict=True)
            env = rows[list(place)] + self.first_env
            self.hub.emit(Refused(**when, env=env, slot=slot, op=op, reason=reason))

    def _changes(self, when: Mapping[str, int], transition: Transition) -> None:
        """What seeds went through, and what the governor took back."""
        changes, trips = transition.epoch.transitions, transition.epoch.trips
        if len(changes):
            now, before = (x.lifecycle.blueprint for x in (transition.after, transition.before))
            why = {trip.environment: str(trip) for trip in trips}
            reasons = changes.reasons()
            for place in (changes.cause == Cause.GOVERNOR).nonzero()[:, 0].tolist():
                reasons[place] = why[int(changes.host[place])]
            self.hub.emit(
                LifecycleChanged(
                    **when,
                    env=changes.host + self.first_env,
                    slot=changes.slot,
                    before=changes.before,
                    after=changes.after,
                    cause=changes.cause,
                    blueprint=torch.where(now != NOTHING, now, before)[changes.host, changes.slot],
                    reason=reasons,
                )
            )
        if trips:
            env = [self.first_env + trip.environment for trip in trips]
            self.hub.emit(RolledBack(**when, env=env, reason=[str(trip) for trip in trips]))

    def _endings(self, when: Mapping[str, int], transition: Transition, returns: Tensor) -> None:
        rows = transition.terminals.nonzero()[:, 0]
        if not len(rows):
            return
        after = transition.after
        cases = [transition.cases[row] for row in rows.tolist()]
        control = self.garden.controls.validation(cases)[:, -SCORED_EPOCHS:].mean(1)
        gain, exposure = after.objective[rows], after.exposure[rows]
        kept = after.lifecycle.params * after.lifecycle.at(SeedStage.FOSSILIZED)
        self.hub.emit(
            EpisodeEnded(
                **when,
                env=rows + self.first_env,
                context=[case.context.name for case in cases],
                seed=[case.seed for case in cases],
                # What is worth after a rollback is not measured before the round's end.
                validation=(control + gain).masked_fill(after.rolled_back[rows], torch.nan),
                control=control,
                net_gain=net_of_rent(gain, exposure, self.garden.reward.rent),
                returns=returns[rows],
                added=kept.sum(1)[rows],
                exposure=exposure,
                interventions=after.interventions[rows],
                rolled_back=after.rolled_back[rows],
            )
        )
