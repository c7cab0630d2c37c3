"""What the study of transfer came to: its raw results as tables, and the figures made of them.

Groups whose cases were not played by all learners and all rules are left out, and named.

Shapes: `R` trainings, `C` worlds or tasks, `E` cases or seeds of each.
"""

import json
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from esper.garden.evaluation import HARM
from esper.garden.statistics import Array, Estimate, mean
from esper.leyline.errors import DataError
from studies.comparisons import difference_elsewhere, paired_difference
from studies.garden_plots import GARDEN
from studies.judging import TOOK, Net, read_judged
from studies.report.own_models import KEPT, NEVER, OwnRun, costs_of, read_own
from studies.transfer_plan import CHOSEN, COSTS, OWN, PLAN, SPECIALIST, TUNED
from studies.tuned_rules import AUDITION, TunedRule, read_tuned, rivals

PACKED = (
    "judged/*.jsonl",
    "validated/*.jsonl",
    "own/*.json",
    "own/*/*.json",
    TUNED,
    CHOSEN,
    PLAN,
    COSTS,
)

Table = dict[str, Array]  # net points [C, E] of each controller
Figures = dict[str, float]


@dataclass(frozen=True)
class Ablation:
    """A training that lacks something, and one of the same seed that does not."""

    words: str
    lacks: str  # what its name begins with
    whole: str  # the same of who is compared; `learner` is what a training is reported with


ABLATIONS = {
    "fit_alone": Ablation("the fit without PPO, against both", "fit", "both"),
    "ppo_alone": Ablation("PPO without a fit, against both", "ppo", "both"),
    "no_waiting": Ablation("waiting taken for never, fits", "hasty", "fit"),
    "no_reserve": Ablation("no reserve against planting, fits", "fit", "wary"),
    "one_shot": Ablation("one seed an episode, against any number", "one_shot", "learner"),
    "no_shadows": Ablation("a fit without shadows, against a fit", "no_shadows", "fit"),
    "no_properties": Ablation("identity for properties, fits", "no_properties", "fit"),
}


@contextmanager
def opened(runs: Path) -> Iterator[Path]:
    """The folder of a study, or what was packed of one."""
    if runs.is_dir():
        yield runs
        return
    with tempfile.TemporaryDirectory() as folder, tarfile.open(runs, "r:xz") as packed:
        packed.extractall(folder, filter="data")
        yield Path(folder)


def pack(runs: Path, out: Path) -> None:
    """All that a report is made of, in one small file; scores of single samples are left out."""
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted({path for kind in PACKED for path in runs.glob(kind)}):
            copy = Path(folder) / file.relative_to(runs)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = file.read_text(encoding="utf-8")
            if file.parent.parent == runs / OWN:
                text = json.dumps({k: v for k, v in json.loads(text).items() if k in KEPT})
            copy.write_text(text, encoding="utf-8")
        with tarfile.open(out, "w:xz", preset=9) as packed:
            packed.add(folder, arcname=".")


# --- results ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """Everything that was played, by group."""

    learners: tuple[str, ...]  # one of every training
    rules: Mapping[str, TunedRule]
    plan: Mapping[str, Any]
    costs: Sequence[Mapping[str, Any]]
    tables: Mapping[str, Table]
    chosen: Mapping[str, Mapping[str, Sequence[float]]]  # candidates: validation points, harm
    own_costs: Mapping[str, float]  # FLOPs over those of plain training, by controller
    took: Mapping[str, float]  # share of the time of judging, by group

    @classmethod
    def read(cls, runs: Path) -> "Results":
        try:
            plan, chosen = (json.loads((runs / name).read_text()) for name in (PLAN, CHOSEN))
            rules = read_tuned(runs / TUNED)
        except FileNotFoundError as error:
            raise DataError(
                f"{runs} holds no study of transfer that could be reported",
                given=f"no {Path(error.filename).name}",
                fix="run the study up to its step `validate`",
            ) from error
        costs = [json.loads(line) for line in (runs / COSTS).read_text().splitlines()]
        groups = (*plan["groups"], GARDEN)
        played = {group: read_judged(runs / "judged", group) for group in groups}
        _require_one_of_each([net for nets in played.values() for net in nets])
        tables = {group: table_of(nets) for group, nets in played.items()}
        own = read_own(runs / OWN)
        tables[OWN] = _own_table(own)
        for group, table in tables.items():  # of worlds that nobody played there is no trace
            shape = tuple(plan["shapes"][group])
            tables[group] = {name: own for name, own in table.items() if own.shape == shape}
        took = _shares_of_time(runs / "judged" / TOOK)
        return cls(tuple(chosen), rules, plan, costs, tables, chosen, costs_of(own), took)

    @property
    def specs(self) -> list[str]:
        return rivals(self.rules)

    @property
    def groups(self) -> list[str]:
        """Those in which all learners and all rules have played everything."""
        names = [*self.learners, *self.specs]
        return [group for group in (*self.plan["groups"], OWN)
                if all(name in self.tables[group] for name in names)]  # fmt: skip

    @property
    def missing(self) -> list[str]:
        return [group for group in (*self.plan["groups"], OWN) if group not in self.groups]

    def stacked(self, group: str, names: Sequence[str]) -> Array:
        """[R, C, E]"""
        return np.stack([self.tables[group][name] for name in names])

    def strongest(self, group: str) -> str:
        """The rule that is best on these very cases."""
        return max(self.specs, key=lambda spec: float(self.tables[group][spec].mean()))

    def lead(self, group: str) -> Estimate:
        """Of the learners over the strongest rule."""
        rule = self.tables[group][self.strongest(group)]
        return paired_difference(self.stacked(group, self.learners), rule, statistic=mean)

    @property
    def harmful(self) -> float:
        """Share of all the learners' episodes."""
        ours = [self.stacked(group, self.learners).ravel() for group in self.groups]
        return float((np.concatenate(ours) < -HARM).mean()) if ours else float("nan")

    @property
    def drawn(self) -> list[str]:
        """Groups of drawn worlds: their points are of one kind, and their shapes are the same."""
        return [group for group in self.groups if group != OWN]

    def over(self, groups: Sequence[str], names: Sequence[str]) -> Array:
        """[R, C, E] of all worlds of these groups"""
        return np.concatenate([self.stacked(group, names) for group in groups], axis=1)

    def over_all(self, names: Sequence[str]) -> Array:
        return self.over(self.drawn, names)

    @property
    def best_single(self) -> str:
        """The one rule that is best over all drawn worlds."""
        return max(self.specs, key=lambda spec: float(self.over_all([spec]).mean()))

    def lead_over_all(self, spec: str) -> Estimate:
        """Of the learners over this one rule in all drawn worlds."""
        return paired_difference(
            self.over_all(self.learners), self.over_all([spec])[0], statistic=mean
        )

    def lead_elsewhere(self, spec: str) -> Estimate:
        """The same, as it might be in other worlds that are drawn like these."""
        return difference_elsewhere(self.over_all(self.learners), self.over_all([spec]))

    @property
    def garden(self) -> Estimate | None:
        table = self.tables[GARDEN]
        if not {SPECIALIST, *self.learners} <= set(table):
            return None
        ours = self.stacked(GARDEN, self.learners)
        return paired_difference(ours, table[SPECIALIST], statistic=mean)

    @property
    def ablations(self) -> dict[str, Ablation]:
        """Those that somebody could have played, fits to the fewest plots last."""
        names = {name for table in self.tables.values() for name in table}
        found = (re.fullmatch(r"plots_(\d+)-\d+", name) for name in names)
        plots = sorted({int(each[1]) for each in found if each}, reverse=True)
        words = "a fit to {:,} plots of drawn seeds, against all gains"
        fewer = {f"plots_{n}": Ablation(words.format(n), f"plots_{n}", "hasty") for n in plots}
        return ABLATIONS | fewer

    def paired_names(self, ablation: Ablation, groups: Sequence[str]) -> list[tuple[str, str]]:
        """Who lacks something and has played all these groups, as has the training of the same seed
        that does not, which is named behind."""
        played = set.intersection(*(set(self.tables[group]) for group in groups))
        found = []
        for each in sorted(played):
            if named := re.fullmatch(rf"{ablation.lacks}-(\d+)", each):
                seed = int(named[1])
                whole = f"{ablation.whole}-{seed}"
                if ablation.whole == "learner":
                    whole = self.learners[seed] if seed < len(self.learners) else ""
                found += [(each, whole)] if whole in played else []
        return found

    def ablated(self, ablation: Ablation, groups: Sequence[str]) -> Estimate | None:
        """How much better it is than what lacks nothing, in all worlds of these groups."""
        pairs = self.paired_names(ablation, groups) if groups else []
        if not pairs:
            return None
        lacking, whole = (self.over(groups, [pair[place] for pair in pairs]) for place in (0, 1))
        apart = lacking - whole
        return paired_difference(apart, np.zeros_like(apart[0]), statistic=mean)


def _shares_of_time(file: Path) -> dict[str, float]:
    """By group; nothing where it was not noted. A line that was cut off is none."""
    seconds: dict[str, float] = {}
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    for line in text.rpartition("\n")[0].splitlines():
        told = json.loads(line)
        seconds[told["group"]] = seconds.get(told["group"], 0.0) + told["seconds"]
    whole = sum(seconds.values())  # none, if all had been played before it was noted
    return {group: own / whole for group, own in seconds.items()} if whole else {}


def table_of(played: Sequence[Net]) -> Table:
    """[C, E] of every controller that has played all cases that anybody has."""
    places = sorted({(net.world, net.case) for net in played})
    worlds, cases = ({place[axis] for place in places} for axis in (0, 1))
    if len(places) < len(worlds) * len(cases):
        return {}
    points: dict[str, dict[tuple[int, int], float]] = {}
    for net in played:
        points.setdefault(net.controller, {})[net.world, net.case] = net.points
    return {
        name: np.array([own[place] for place in places]).reshape(len(worlds), len(cases))
        for name, own in points.items()
        if len(own) == len(places)
    }


def _require_one_of_each(played: Sequence[Net]) -> None:
    made: dict[str, str] = {}
    for net in played:
        if made.setdefault(net.controller, net.made) != net.made:
            raise DataError(
                f"Results of two controllers go by the name {net.controller!r}",
                given=f"{made[net.controller]} and {net.made}",
                fix="remove what was played by the one that is no longer there",
            )


def _own_table(runs: Sequence[OwnRun]) -> Table:
    """[tasks, seeds]: points of test score over the host that never grew; no rent is charged, since
    a budget limits what is added."""
    never = {(run.task, run.seed): run.found["test"] for run in runs if run.controller == NEVER}
    tasks = sorted({task for task, _ in never})
    nets = [Net(run.controller, run.controller, OWN, tasks.index(run.task), run.seed,
                run.found["test"] - never[run.task, run.seed])
            for run in runs
            if run.controller != NEVER and (run.task, run.seed) in never]  # fmt: skip
    return {name: own for name, own in table_of(nets).items() if own.size == len(never)}


# --- figures ----------------------------------------------------------------------------------


def figures_of(results: Results) -> Figures:
    found: Figures = {"c2_transfer_trainings": len(results.learners)}
    for group in results.groups:
        rule = results.tables[group][results.strongest(group)]
        _add(found, f"c2_heldout_{group}_vs_strongest_rule", results.lead(group))
        found[f"c2_heldout_{group}_rule_points"] = float(rule.mean())
        ours = results.stacked(group, results.learners)
        found[f"c2_heldout_{group}_points"] = float(ours.mean())
        for name, ablation in results.ablations.items() if group != OWN else ():
            _add(found, f"c2_ablation_{name}_{group}", results.ablated(ablation, [group]))
    if results.groups:
        found["c2_heldout_harmful_rate"] = results.harmful
    if results.drawn:
        single = results.best_single
        _add(found, "c2_heldout_drawn_vs_best_single_rule", results.lead_over_all(single))
        elsewhere = results.lead_elsewhere(single)
        _add(found, "c2_heldout_drawn_vs_best_single_rule_elsewhere", elsewhere)
        for who, names in (("", results.learners), ("rule_", [single])):
            points = results.over_all(names)
            found[f"c2_heldout_drawn_{who}points"] = float(points.mean())
            found[f"c2_heldout_drawn_{who}harmful_rate"] = float((points < -HARM).mean())
        for name, ablation in results.ablations.items():
            _add(found, f"c2_ablation_{name}_drawn", results.ablated(ablation, results.drawn))
    if OWN in results.groups:
        factors = [results.own_costs[name] for name in results.learners]
        found["c2_heldout_own_flops_factor"] = sum(factors) / len(factors)
        found["c2_heldout_own_flops_factor_audition"] = results.own_costs[AUDITION]
    _add(found, "c2_garden_vs_specialist", results.garden)
    found |= {f"c2_transfer_episodes_{kind}": rule.episodes for kind, rule in results.rules.items()}
    found["c2_transfer_episodes_gains"] = results.plan["gains"]
    found["c2_transfer_episodes_ppo"] = results.plan["ppo"]
    found["c2_transfer_gpu_minutes"] = gpu_minutes(results)
    return {name: float(value) for name, value in found.items()}


def gpu_minutes(results: Results) -> float:
    """Of everything, the collection of gains included; what ran side by side counts once."""
    spans = sorted((e["began"], e["ended"]) for e in results.costs if e["device"] != "cpu")
    seconds, latest = results.plan["gains_seconds"], 0.0
    for began, ended in spans:
        seconds += max(0.0, ended - max(began, latest))
        latest = max(latest, ended)
    return float(seconds / 60.0)


def _add(found: Figures, name: str, estimate: Estimate | None) -> None:
    if estimate is not None:
        ends = zip(("", "_lo", "_hi"), estimate, strict=True)
        found |= {f"{name}{end}": value for end, value in ends}
