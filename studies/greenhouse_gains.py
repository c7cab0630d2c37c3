"""What planting gains, measured: drawn worlds are played, and what came of seeds is kept.

Of every case there are a control, the rule `audition`, four seeds planted at one moment, one that
waits then, and three seeds planted later beside the first of them. They are drawn; where a fitted
controller is given, those that it likes best take the place of all but one of the first ones and of
the later ones, at moments of its choice, and who waits decides some epochs later as it does: so
gains are measured where it has to decide, against what waiting brings. They are kept, on validation
and test data together, with what was seen when seeds were planted, in compressed parts of a few
plots each. These worlds are for nothing else, so all their data may teach.

Shapes: `D` decisions, `K` choices of one, waiting the first of them, `A` anchors, `F` features, `C`
cases.
"""

import argparse
import io
import json
import lzma
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import default_rng
from torch import Tensor

from esper.archive import write_whole
from esper.garden import LAYOUT, Bed, Plot
from esper.garden.contexts import TEST_SAMPLES, VALIDATION_SAMPLES
from esper.garden.episodes import EPOCHS_ALONE
from esper.garden.evaluation import HARM
from esper.garden.reward_settings import RewardConfig
from esper.garden.rewards import RewardState
from esper.leyline import Actions, Blend, LifecycleOp
from esper.leyline.constants import SCORED_EPOCHS
from esper.leyline.streams import derive_seed
from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers.learned import load_saved
from esper.tamiyo.controllers.specs import Arm
from esper.tamiyo.token_layout import WHOLE_TOKEN
from studies.garden_plots import house_of

FIRST, LATER = 4, 3  # seeds that are tried at a case's first decision, and at its second
DRAWN = 1  # of these each, where a controller has likings
WAITER = FIRST + LATER  # its place among the players of a case; the rule's is the last
PLAYERS = WAITER + 2
PLAYED = PLAYERS + 1  # episodes of a case: the control too
WAITED = 3  # epochs, by who does not plant at the first decision
PLOTS_OF_PART = 4
HEARD, LATEST = 6, 10  # epochs before the first seed, where shadows are heard before it
LEAST_LEFT = 7  # epochs after one
LIKELY = 0.3  # harm to a case, where a later seed does some and nobody knows what there was before
ANCHORS = 2  # looks at a case's rows, of which those are kept that say something
VERSION = 6  # of how it is played
Place = tuple[str, str]  # a slot and a blueprint
HEADS = ("op", "slot", "blueprint", "blend")  # whose masks are kept


class Gains(NamedTuple):
    """What came of decisions."""

    observations: Tensor  # [D, F]
    masks: dict[str, Tensor]  # what was legal, by head
    actions: Tensor  # [D, K, H]: waiting, then one seed or another; canonical
    # [D, K] net points over the control, or of a later decision over the first seed alone; of
    # waiting too, which may end in planting, 0 if nobody knows; NaN: not tried
    gains: Tensor
    base: Tensor  # [D] points of that over the control: 0 at first; NaN: not known
    rule: Tensor  # [D] net points of the rule over the control; NaN: a later decision
    plot: Tensor  # [D] its number
    seed: Tensor  # [D] of the greenhouse; -1: nobody knows
    waits: Tensor  # [D] bool: it was measured what waiting brings who may plant later

    @classmethod
    def load(cls, folders: Sequence[Path]) -> "Gains":
        parts = in_one(parts_of(folders))
        whole = {name: torched(parts[name]) for name in cls._fields if name != "masks"}
        chosen = Actions(LAYOUT.space, whole["actions"].flatten(0, 1)).canonical().values
        whole["actions"] = chosen.view_as(whole["actions"])
        found = cls(masks={head: torched(parts[f"mask_{head}"]) for head in HEADS}, **whole)
        # In early parts a row may have failed in training when another of its case decided, and
        # what had been pruned was planted again, which was then taken for a later decision.
        bare = LAYOUT.split(found.observations)[0][:, WHOLE_TOKEN.names.index("added_params")] == 0
        fine = found.masks["op"][:, LifecycleOp.GERMINATE] & (found.first | ~bare)
        # Nor was it measured in all of them what waiting brings: it is taken for never planting.
        waits = found.gains[:, 0]
        waits[waits.isnan()] = 0.0
        return found.rows(fine.nonzero()[:, 0])

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Gains":
        named = {name: change(each) for name, each in self._asdict().items() if name != "masks"}
        return Gains(masks={head: change(mask) for head, mask in self.masks.items()}, **named)

    def rows(self, index: Tensor) -> "Gains":
        return self.changed(lambda part: part[index])

    def worth(self, harm: float, unit: float) -> Tensor:
        """[D, K]: of each choice in units of so many points, 2 at most; ending in harm costs so
        many points more, as far as it is known. NaN: it was not tried."""
        worth = (self.gains / unit).clamp(-2.0, 2.0)
        price = torch.where(self.base.isnan(), LIKELY * harm, harm)[:, None] / unit
        return torch.where(self.harmed(self.gains), worth - price, worth)

    def waiting(self, worth: Tensor, where: Tensor) -> "Gains":
        """The same, where [D] bool waiting is worth so many points [D]."""
        waited = torch.where(where, worth, self.gains[:, 0])
        return self._replace(gains=torch.cat((waited[:, None], self.gains[:, 1:]), 1))

    @property
    def first(self) -> Tensor:
        """[D] bool: nothing had been planted before."""
        return ~self.rule.isnan()

    def harmed(self, gains: Tensor) -> Tensor:
        """[D, ...] bool: with these gains a case would end in harm; where nobody knows what it had
        gained before, as if that were nothing."""
        base = self.base.nan_to_num(0.0).view(-1, *(1 for _ in gains.shape[1:]))
        return gains + base < -HARM


class Anchors(NamedTuple):
    """Moments in which only the rule knows what to do: it tends what grows."""

    observations: Tensor  # [A, F]
    mask: Tensor  # [A, ops]
    op: Tensor  # [A]
    plot: Tensor  # [A]
    seed: Tensor  # [A]

    @classmethod
    def load(cls, folders: Sequence[Path]) -> "Anchors":
        parts = in_one(parts_of(folders))
        found = cls(*(torched(parts[f"anchor_{name}"]) for name in cls._fields))
        # In early parts it was kept too when the rule listens; whether to plant then was not tried.
        return found.rows((found.op != LifecycleOp.WAIT).nonzero()[:, 0])

    def rows(self, index: Tensor) -> "Anchors":
        return Anchors(*(part[index] for part in self))


def parts_of(folders: Sequence[Path]) -> list[Mapping[str, Any]]:
    """Those of folders, and what was packed of others into files."""
    files = [file for each in folders for file in sorted(each.glob("gains-*.npz")) or [each]]
    if lost := [file for file in files if not file.is_file()]:
        raise SystemExit(f"{lost[0]} has no parts: collect them first")
    return list(map(_part, files))


def _part(file: Path) -> Mapping[str, Any]:
    packed = file.suffix == ".xz"
    part = dict(np.load(io.BytesIO(lzma.decompress(file.read_bytes())) if packed else file))
    if "rule" in part and "waits" not in part:  # in early parts who waited never planted
        part["waits"] = np.zeros(len(part["rule"]), dtype=bool)
    if "rule" in part and "base" not in part:  # nor do they say what a first seed had gained
        part["base"] = np.where(np.isnan(part["rule"]), np.nan, 0.0).astype(np.float32)
    if "seed" not in part:  # the folder says it, or a file's name, as in `gains-seed1`
        made, named = file.parent / "made.json", re.search(r"seed(\d+)", file.name)
        known = int(named[1]) if named else -1
        seed = json.loads(made.read_text())["seed"] if made.exists() else known
        for kind in [name.removesuffix("plot") for name in part if name.endswith("plot")]:
            part[f"{kind}seed"] = np.full(len(part[f"{kind}plot"]), seed)
    return part


def in_one(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arrays behind each other; what points `after` a moment points at the same one."""
    names = [name for name in parts[0] if name != "scale"]  # which early parts have
    found = {name: np.concatenate([part[name] for part in parts]) for name in names}
    if "after" in found:
        lengths = np.cumsum([0, *(len(part["after"]) for part in parts)])
        moved = [np.where(part["after"] < 0, -1, part["after"] + before)
                 for part, before in zip(parts, lengths, strict=False)]  # fmt: skip
        found["after"] = np.concatenate(moved)
    return found


def pack(options: argparse.Namespace) -> None:
    """One small file of all parts."""
    parts, whole = parts_of(options.gains), io.BytesIO()
    np.savez(whole, **in_one(parts))
    write_whole(options.out, lzma.compress(whole.getvalue(), preset=9))


def torched(array: Any) -> Tensor:
    """In the type that is computed with."""
    whole = torch.from_numpy(array)
    if whole.dtype is torch.int16:
        return whole.long()
    return whole.float() if whole.is_floating_point() else whole


def places_liked(logits: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Tensor:
    """[D, S, P]: log-probs of slot and blueprint if something is planted."""
    legal = masks["blueprint"] & masks["slot"][:, LifecycleOp.GERMINATE, :, None]
    slot_logits = logits["slot"][:, LifecycleOp.GERMINATE].masked_fill(~legal.any(2), -torch.inf)
    blueprint_log_probs = logits["blueprint"].masked_fill(~legal, -torch.inf).log_softmax(2)
    slot_log_probs = slot_logits.log_softmax(1)
    return slot_log_probs[..., None] + blueprint_log_probs.masked_fill(~legal, -torch.inf)


class Noted:
    """What is kept of a plot: decisions with what was seen, and anchors."""

    def __init__(self, bed: Bed, number: int) -> None:
        self.bed, self.number = bed, number
        self.kept: dict[str, list[Tensor]] = {}
        # Cases, which rows chose, and those whose points theirs are compared with: [D], [D, K], [D]
        self.chosen: list[tuple[Tensor, Tensor, Tensor]] = []

    def _keep(self, seen: Mapping[str, Tensor]) -> None:
        for name, each in seen.items():
            self.kept.setdefault(name, []).append(each)

    def decided(
        self, cases: Tensor, waits: Tensor, tried: Tensor, since: Tensor, values: Tensor
    ) -> None:
        """Keep what is seen in these cases [C] bool, whose rows `waits` [C] wait and `tried`
        [C, K - 1] plant or not, compared with rows `since` [C]."""
        cases = cases & self.bed.legal.masks["op"][tried[:, 0], LifecycleOp.GERMINATE]
        rows = tried[cases]
        seen = {f"mask_{head}": self.bed.legal.masks[head][rows[:, 0]] for head in HEADS}
        seen["observations"] = self.bed.observations[rows[:, 0]].half()
        chosen = torch.zeros(len(rows), 1 + FIRST, 4, dtype=torch.int16)
        chosen[:, 1 : 1 + rows.shape[1]] = values[rows].short()
        self._keep(seen | {"actions": chosen})
        everyone = torch.full((len(rows), 1 + FIRST), -1)  # nobody
        everyone[:, 0], everyone[:, 1 : 1 + rows.shape[1]] = waits[cases], rows
        self.chosen.append((cases.nonzero()[:, 0], everyone, since[cases]))

    def looked(self, rows: Tensor) -> None:
        """Keep what the rule does in these rows."""
        self._keep({
            "anchor_observations": self.bed.observations[rows].half(),
            "anchor_mask": self.bed.legal.masks["op"][rows],
            "anchor_op": self.bed.advice["op"][rows].short(),
            "anchor_plot": torch.full((len(rows),), self.number).short(),
        })  # fmt: skip

    def found(self, net: Tensor, rule: Tensor) -> dict[str, Any]:
        """All of it, with the points `net` [N] of rows; `rule` [C] has the rule's in each case."""
        players = len(self.bed.players)
        known = torch.cat([net, torch.full((1,), torch.nan, dtype=net.dtype)])  # and nobody's
        actions = torch.cat(self.kept["actions"])
        cases, rows, since = (torch.cat(each) for each in zip(*self.chosen, strict=True))
        gains = known[rows] - net[since[:, None]]
        planted = actions[:, 1:, 0] == LifecycleOp.GERMINATE
        gains[:, 1:] = gains[:, 1:].masked_fill(~planted, torch.nan)
        whole = {name: torch.cat(each) for name, each in self.kept.items()}
        base = net[since] - net[players + cases]
        whole |= {"gains": gains.float(), "base": base.float()}
        whole["rule"] = rule[cases].masked_fill(since < players, torch.nan).float()
        whole["plot"] = torch.full((len(cases),), self.number).short()
        return {name: each.cpu().numpy() for name, each in whole.items()}


class Asked(NamedTuple):
    """What a network would do in a row; nothing in particular if there is none."""

    wants: bool = False  # to plant now
    liked: tuple[Tensor, Tensor] | None = None  # [S, P] each: scores of seeds, and by which blend


class Measurement:
    """A plot is played, and what is seen when seeds are planted is kept.

    Of every case rows 0 to 3 plant a first seed; 4 to 6 plant that of row 0 and later a second one;
    row 7 waits; the last one does what the rule says, and all are tended as it says. Moments and
    seeds are drawn. If there is a `network`, it decides as soon as it would plant, and at a moment
    that is drawn if it would not; then all but rows 3 and 6 plant what it likes best, and row 7
    some epochs later, if it would plant then.
    """

    def __init__(
        self, plot: Plot, number: int, device: str, network: TokenActorCritic | None = None
    ) -> None:
        self.network = network
        self.plot, self.number = plot, number
        self.bed = Bed(plot, PLAYERS, device=device, test=True)
        self.rows = self.bed.players.view(-1, PLAYERS)  # [C, players]
        self.chance = default_rng(derive_seed("gains", plot.name))
        self.latest = plot.horizon - LEAST_LEFT
        self.earliest = min(EPOCHS_ALONE, self.latest)
        cases = len(self.rows)
        self.plans: list[list[tuple[Arm, ...]]] = [[()] * PLAYERS for _ in range(cases)]
        # The epoch of each case's first and later decision: at the latest, until it is made.
        self.first = [self._first() for _ in range(cases)]
        self.later = [plot.horizon] * cases
        self.made = [0] * cases  # decisions
        looked = (cases, ANCHORS)
        self.looks = torch.from_numpy(self.chance.integers(1, plot.horizon, looked))  # epochs
        self.noted = Noted(self.bed, number)

    def _first(self) -> int:
        """At once, or when shadows were heard; of these with a network any time in half."""
        first, last, kind = self.earliest, HEARD - 1, self.chance.random()
        if kind < 0.5:
            first = HEARD
            last = LATEST if self.network is None or kind < 0.25 else self.latest
        first, last = (min(each, self.latest) for each in (first, last))
        return int(self.chance.integers(first, last + 1))

    def _ask(self, epoch: int) -> None:
        """Cases whose first or later decision is now get their plans for it."""
        for made, row in enumerate((0, FIRST)):
            moments = (self.first, self.later)[made]
            open_ = [case for case in self._quiet(row) if self.made[case] == made
                     and (made == 0 or epoch >= self.first[case] + 2)]  # fmt: skip
            if not open_ or epoch < self.earliest:
                continue
            for case, asked in zip(open_, self._asked(self.rows[open_, row]), strict=True):
                if (asked.wants and epoch <= self.latest) or epoch >= moments[case]:
                    moments[case], self.made[case] = epoch, made + 1
                    (self._plan_first, self._plan_later)[made](case, epoch, asked)
        self._ask_waiting(epoch)

    def _ask_waiting(self, epoch: int) -> None:
        """Those who waited long enough plant what the network likes best, if it would plant."""
        waiting = [
            case
            for case in self._quiet(WAITER)
            if self.made[case] and not self.plans[case][WAITER]
            and self.first[case] + WAITED <= epoch <= self.latest
        ]  # fmt: skip
        if self.network is None or not waiting:
            return
        for case, asked in zip(waiting, self._asked(self.rows[waiting, WAITER]), strict=True):
            if asked.wants and (fits := self._fitting(0)):
                self.plans[case][WAITER] = (self._arms(fits, epoch, 1 + DRAWN, asked)[0],)

    def _quiet(self, row: int) -> list[int]:
        """Cases in which the rule has nothing to tend now in this one of their rows."""
        op = self.bed.advice["op"][self.rows[:, row]]
        plain = (op == LifecycleOp.WAIT) | (op == LifecycleOp.GERMINATE)
        return [int(case) for case in plain.nonzero()[:, 0]]

    def _plan_first(self, case: int, epoch: int, asked: Asked) -> None:
        self.later[case] = int(self.chance.integers(epoch + 2, max(epoch + 3, self.latest + 1)))
        if fits := self._fitting(0):
            firsts = self._arms(fits, epoch, FIRST, asked)
            self.plans[case][:WAITER] = [(arm,) for arm in [*firsts, *firsts[:1] * LATER]]

    def _plan_later(self, case: int, epoch: int, asked: Asked) -> None:
        """Seeds in other slots than the first, if there is room for one."""
        plans = self.plans[case]
        if not plans[0]:
            return
        first = plans[0][0]
        fits = [place for place in self._fitting(self._cost(first)) if place[0] != first.slot]
        if fits:
            seeds = self._arms(fits, epoch, LATER, asked)
            plans[FIRST:WAITER] = [(first, seed) for seed in seeds]

    def _arms(self, places: list[Place], epoch: int, count: int, asked: Asked) -> list[Arm]:
        """So many seeds, drawn; if somebody was asked, all but the last are the best liked ones."""
        arms = [self._arm(places, epoch) for _ in range(count)]
        if asked.liked is not None:
            scores, blends = asked.liked
            order = sorted(places, key=lambda place: -float(scores[self._index(place)]))
            order = order[: count - DRAWN]
            liked = [self._arm([place], epoch) for place in order]
            named = [Blend(int(blends[self._index(place)])).name.lower() for place in order]
            chosen = zip(liked, named, strict=True)
            arms[: len(order)] = [replace(arm, blend=name) for arm, name in chosen]
        return arms

    @torch.no_grad()
    def _asked(self, rows: Tensor) -> list[Asked]:
        """What the network would do in each of these rows."""
        if self.network is None:
            return [Asked()] * len(rows)
        seen = self.bed.observations[rows].to(self.network.return_scale.device)
        output = self.network(seen)
        logits = {head: head_logits.cpu() for head, head_logits in output.logits.items()}
        masks = {head: mask[rows] for head, mask in self.bed.legal.masks.items()}
        op = logits["op"].masked_fill(~masks["op"], -torch.inf).argmax(1)
        blends = logits["blend"].masked_fill(~masks["blend"], -torch.inf).argmax(-1)
        wants, liked = (op == LifecycleOp.GERMINATE).tolist(), places_liked(logits, masks)
        return [Asked(*each) for each in zip(wants, zip(liked, blends, strict=True), strict=True)]

    def _index(self, place: Place) -> tuple[int, int]:
        catalogue = self.bed.episodes.population.catalogue
        return catalogue.slots.index(place[0]), catalogue.index(place[1])

    def _fitting(self, spent: int) -> list[Place]:
        """Slots and blueprints that what is left of the budget has room for."""
        population = self.bed.episodes.population
        catalogue, room = population.catalogue, int(population.budget[0]) - spent
        costs = catalogue.total_costs[:, :, Blend.RAMP]
        fits = ((costs >= 0) & (costs <= room)).nonzero().tolist()
        return [(catalogue.slots.names[slot], catalogue.names[kind]) for slot, kind in fits]

    def _arm(self, places: list[Place], epoch: int) -> Arm:
        slot, blueprint = places[int(self.chance.integers(len(places)))]
        blend = list(Blend)[int(self.chance.integers(len(Blend)))].name.lower()
        return Arm(slot=slot, blueprint=blueprint, blend=blend, epoch=epoch)

    def _cost(self, arm: Arm) -> int:
        catalogue = self.bed.episodes.population.catalogue
        return int(catalogue.total_costs[(*arm.place(catalogue), Blend.RAMP)])

    def run(self) -> dict[str, Any]:
        bed, rows = self.bed, self.rows
        controls = len(bed.players) + torch.arange(len(rows))
        for epoch in range(self.plot.horizon):
            before = torch.tensor(self.made)
            self._ask(epoch)
            values = self._planted(epoch)
            plants = values[:, 0] == LifecycleOp.GERMINATE
            tends = (bed.advice["op"] != LifecycleOp.GERMINATE) & ~plants
            tends[rows[:, -1]] = True
            values[tends] = bed.advice.values[tends]
            now, plants = torch.tensor(self.made) > before, plants[rows]  # [C], [C, players]
            first = now & (before == 0)
            tried = (rows[:, WAITER], rows[:, :FIRST], controls)
            self.noted.decided(first & plants[:, :FIRST].any(1), *tried, values)
            later = now & ~first & plants[:, FIRST:WAITER].any(1)
            self.noted.decided(later, rows[:, 0], rows[:, FIRST:WAITER], rows[:, 0], values)
            self._look(epoch)
            bed.step(values, self._deaf())
        net = net_gains(bed)
        found = self.noted.found(net, net[rows[:, -1]] - net[controls])
        return found | {"waits": np.full(len(found["plot"]), self.network is not None)}

    def _deaf(self) -> Tensor:
        """[players] bool: no other decision is asked of them, so nobody need hear their shadows."""
        made = torch.tensor(self.made)[:, None]
        done = torch.zeros_like(self.rows, dtype=torch.bool)
        done[:, :FIRST], done[:, FIRST:WAITER] = made > 0, made > 1
        planted = [bool(plans[WAITER]) for plans in self.plans]
        done[:, WAITER] = torch.tensor(planted) if self.network is not None else made[:, 0] > 0
        done[:, FIRST + 1] = False  # what is seen there is kept
        return done.flatten()

    def _planted(self, epoch: int) -> Tensor:
        """[players, H]: what plans say for this epoch, once, and waiting."""
        catalogue, legal = self.bed.episodes.population.catalogue, self.bed.legal.masks
        values = torch.zeros_like(self.bed.advice.values)
        op = int(LifecycleOp.GERMINATE)
        plans = [plan for plans in self.plans for plan in plans]
        for row, arm in ((row, arm) for row, plan in enumerate(plans) for arm in plan):
            if arm.epoch == epoch:
                slot, kind = arm.place(catalogue)
                blend = int(Blend.named(arm.blend))
                fits = legal["slot"][row, op, slot] & legal["blueprint"][row, slot, kind]
                if fits & legal["op"][row, op] & legal["blend"][row, slot, kind, blend]:
                    values[row] = torch.tensor([op, slot, kind, blend])
        return values

    def _look(self, epoch: int) -> None:
        """Keep what the rule does where it tends what grows."""
        case, look = (self.looks == epoch).nonzero(as_tuple=True)
        rows = torch.where(look % 2 == 0, self.rows[case, -1], self.rows[case, FIRST + 1])
        op = self.bed.advice["op"][rows]
        plain = (op == LifecycleOp.WAIT) | (op == LifecycleOp.GERMINATE)
        self.noted.looked(rows[~plain & self.bed.episodes.running[rows]])


def net_gains(bed: Bed) -> Tensor:
    """[N]: net points of a plot that is over, of players over their controls."""
    scores, players = bed.episodes.ledger.test[:, -SCORED_EPOCHS:].mean(1), len(bed.players)
    grown, control = scores.split([players, len(scores) - players])
    over = grown - control.repeat_interleave(players // len(control))
    return net_points(bed.state, torch.cat((over, control * 0.0)), bed.plot.rent)


def net_points(state: RewardState, tested: Tensor, rent: float) -> Tensor:
    """[N]: gains over the controls on all data that score, `tested` [N] on test data, less rent and
    what a rollback forfeits; what was rolled back has no test score of its own last epochs."""
    share = TEST_SAMPLES / (VALIDATION_SAMPLES + TEST_SAMPLES)
    gain = torch.lerp(state.objective, tested, share)
    gain = torch.where(state.rolled_back, state.objective, gain)
    forfeit = RewardConfig().rollback_penalty + gain.clamp(min=0.0)
    net = gain - rent * state.exposure
    return net - forfeit.masked_fill(~state.rolled_back, 0.0)


def collect(options: argparse.Namespace) -> None:
    """Gains of seeds that are tried out."""
    network: TokenActorCritic | None = None
    made = {}
    if options.fitted is not None:
        kept = load_saved(options.fitted)
        assert isinstance(kept.network, TokenActorCritic), "what `fit` wrote"
        network = kept.network.to(options.device).with_layout(LAYOUT)
        made["fitted"] = kept.controller().fingerprint
    play = lambda plot, number: Measurement(plot, number, options.device, network).run()  # noqa: E731
    collect_parts(options, play, **made)


def collect_parts(
    options: argparse.Namespace, play: Callable[[Plot, int], dict[str, Any]], **how: Any
) -> None:
    """Parts that are missing, one after the other: `play` a plot. A folder says `how` it was."""
    options.out.mkdir(parents=True, exist_ok=True)
    made = {name: getattr(options, name) for name in ("seed", "cases", "longest")}
    made |= {"version": VERSION, **how}
    _require_same(options.out / "made.json", made)
    house, until = house_of(options.seed, options.longest), deadline(options)
    parts = range(0, options.plots, PLOTS_OF_PART)
    for first in parts[options.place :: options.of]:
        file = options.out / f"gains-{first:06d}.npz"
        if file.exists():
            continue
        if time.monotonic() > until:
            print(f"stopped before plot {first}; the same command goes on")
            return
        began, found = time.monotonic(), []
        for number in range(first, first + PLOTS_OF_PART):
            plot = house.plot(number, options.cases)
            found.append(play(plot, number))
        whole: Any = in_one(found)
        half = file.with_name(f"half-{file.name}")  # which loading does not take for a part
        np.savez_compressed(half, **whole)
        os.replace(half, file)
        print(
            f"{file.name}: {len(whole['observations'])} moments, {time.monotonic() - began:.0f} s",
            flush=True,
        )


def _require_same(file: Path, made: Mapping[str, Any]) -> None:
    """What a folder holds was made as is asked for now."""
    if not file.exists():
        write_whole(file, json.dumps(made))
    elif (before := json.loads(file.read_text())) != made:
        raise SystemExit(f"{file} says that it was made with {before}; asked for is {made}")


def deadline(options: argparse.Namespace) -> float:
    """When no other piece of work is begun."""
    return time.monotonic() + (options.seconds or float("inf"))
