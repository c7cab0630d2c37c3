"""What the study of transfer consists of: who is trained, by which commands, and when it is over.

Names of trainings, `-0` and so on behind them for their seeds: `fit`, `both` (the fit, then PPO),
`wary` (the fit with a reserve against planting), `hasty` (a fit that takes waiting for never
planting, by which the others are told what it is worth), `no_shadows` and `no_properties` (fits
that do not see these), `plots_24` (fits to so many plots, as `hasty` is made), `ppo` (PPO alone),
`one_shot` (what a training is reported with, planting once).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from esper.archive.files import write_whole
from esper.garden.evaluation import HARM, fingerprint_of
from esper.garden.greenhouse import GROUPS, TRAINING, VALIDATION
from esper.leyline import LifecycleOp
from esper.leyline.errors import DataError
from esper.tamiyo.controllers.learned import is_saved, load_saved, save_controller
from studies import greenhouse, greenhouse_gains
from studies.ablations import ABLATION, ONE_SHOT, PROPERTIES, SHADOWS
from studies.garden_plots import GARDEN
from studies.judging import controller_of, name_of, numbers_of, read_judged, require_open
from studies.tuned_rules import RULES, Heats, finalists, keep_tuned, read_tuned, rivals, tuned

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs" / "evidence" / "transfer"
# What it consists of, in this order: what is surest to be of use comes first.
STEPS = ("collect", "fit", "train", "rules", "validate", "judge", GARDEN, "own", "ablate",
         "judge-ablations", "report")  # fmt: skip
SPECIALIST = "specialist"
# Logits. Who knows what waiting is worth and is nearly sure waits for more to be heard.
RESERVE = 0.4
MOST_HARM = 0.05  # share of episodes that may end more than `HARM` points below their controls
# The same share on validation worlds, which are drawn as for training: in others it may be larger.
EXPECTED_HARM = 0.04
CHOSEN, TUNED, PLAN, COSTS = "chosen.json", "rules.json", "plan.json", "costs.jsonl"
MOMENTS, WAITING = "moments", "waiting"
HASTY = "hasty-0"  # a fit that does not know what waiting is worth, by which others are told
BLIND = {"no_shadows": SHADOWS, "no_properties": PROPERTIES}
OWN_SHAPE = (6, 5)  # tasks and seeds that docs/greenhouse.md registers
OWN, OWN_OVER = "own", "whole.json"  # the folder of users' tasks, and what says that it is over


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained and played."""

    trainings: int = 5
    both: int = 2  # of these, that go on by PPO
    ablated: int = 1  # trainings without shadows, and without properties
    alone: int = 1  # trainings by PPO alone
    fewer: dict[int, int] = field(default_factory=dict)  # of so many plots, by epochs of the fit
    collected: int | None = None  # plots; None: what is kept
    cases_of_plot: int = 8
    epochs: int = 20  # of fits
    rounds: int = 12  # of PPO
    round: tuple[str, ...] = ()  # further options of PPO
    heats: Heats
    # Worlds by which a training's candidate is chosen: few of them make most of a mean, and who is
    # harmed in one case of a world is harmed in most.
    validation: int = 192
    validated: int = 4  # cases of each
    groups: tuple[str, ...] = GROUPS
    worlds: int | None = None  # of each group; None: all that are registered
    cases: int = 24  # of each, 16 at least
    rows: int = 640  # that train at once
    longest: int = 60
    own: tuple[str, ...] | None = ()  # further options of the tasks of users' own; None: without


SIZES = {
    "gpu": Size(
        # Fits are told that ending in harm costs 8 points: of all that was tried, as much as if
        # points that are lost count five times. The value, which fits leave alone, learns first.
        round=("--caution", "5", "--warm", "1"),
        fewer={24: 400, 100: 200, 1000: 60, 3492: 30},
        heats=Heats(worlds=(32, 96), cases=4, finalists=8),
    ),
    "tiny": Size(
        trainings=1,
        both=1,
        alone=0,
        fewer={1: 1},
        collected=2,  # what waiting is worth is told by two halves
        cases_of_plot=1,
        epochs=1,
        rounds=1,
        round=("--envs", "2", "--plots", "1", "--players", "2", "--minibatches", "1"),
        heats=Heats(worlds=(1, 1), cases=1, finalists=1, candidates=1),
        validation=1,
        validated=1,
        groups=(VALIDATION,),
        worlds=1,
        cases=1,
        rows=8,
        longest=12,
        own=None,
    ),
}


class Task(NamedTuple):
    """A resumable command of the study.

    `over` reports whether the command has nothing left to do. `needs_gains` marks a command
    that reads the measured gains, which are not in the repository.
    """

    words: list[str]
    over: Callable[[], bool]
    processes: int = 1
    program: str = "studies.greenhouse"
    needs_gains: bool = False


@dataclass(frozen=True)
class Study:
    """The folder of a study, and how it is carried out."""

    out: Path
    size: Size
    device: str = "cpu"
    processes: int = 1
    fits: int = 4  # at once: more share a GPU's time
    ranks: int = 8  # of a training by PPO
    final: bool = False
    gains: Path | None = None  # folder of gains that were collected before

    # --- who takes part ----------------------------------------------------------------------

    def folder(self, name: str) -> Path:
        return self.out / name / ("last" if name.startswith(("both", "ppo")) else "best")

    def trained(self, kind: str, count: int | None = None) -> list[str]:
        return [f"{kind}-{seed}" for seed in range(self.size.trainings if count is None else count)]

    @property
    def both(self) -> list[str]:
        return self.trained("both", self.size.both) if self.size.rounds else []

    @property
    def candidates(self) -> list[str]:
        """Of which every training is reported with one."""
        return [*self.trained("fit"), *self.both, *self.trained("wary")]

    @property
    def lacking(self) -> dict[str, list[str]]:
        """Fits of ablations by name, with what is further said of each."""
        few = self.size.ablated
        found = {name: ["--ablation", what]
                 for kind, what in BLIND.items() for name in self.trained(kind, few)}  # fmt: skip
        for plots, epochs in self.size.fewer.items():
            found[f"plots_{plots}-0"] = [
                "--contexts",
                str(plots),
                "--epochs",
                str(epochs),
                "--hasty",
            ]
        return found

    @property
    def rules(self) -> list[str]:
        return rivals(read_tuned(self.out / TUNED))

    def named(self, names: Sequence[str]) -> list[str]:
        return [f"{name}={self.folder(name)}" for name in names]

    @property
    def learners(self) -> list[str]:
        """Those that trainings are reported with."""
        return list(json.loads((self.out / CHOSEN).read_text(encoding="utf-8")))

    @property
    def reported(self) -> list[str]:
        """These, and all that ablations are compared with."""
        return list(dict.fromkeys([*self.learners, *self.trained("fit"), *self.both]))

    def note_plan(self) -> None:
        """What the report says of costs and cannot know from results."""
        size = self.size
        if size.collected:
            gains = [{"plots": size.collected, "cases": size.cases_of_plot, "seconds": 0,
                      "episodes": greenhouse_gains.PLAYED + 2}]  # and who listens  # fmt: skip
        else:  # every collection, also those that later ones replaced
            gains = list(json.loads((KEPT / "collected.json").read_text()).values())
        ppo = greenhouse.parsed(["train", "--out", "-", *size.round])
        told = {
            "trainings": size.trainings,
            "gains": sum(one["plots"] * one["cases"] * one["episodes"] for one in gains),
            "gains_seconds": sum(one["seconds"] for one in gains),
            "ppo": size.rounds * (ppo.envs + ppo.envs // ppo.players),
            "groups": size.groups,
            "shapes": {
                group: [len(numbers_of(group, 0, size.worlds)), size.cases]
                for group in (*size.groups, GARDEN)
            }
            | {OWN: OWN_SHAPE},
        }
        plan, text = self.out / PLAN, json.dumps(told, indent=1) + "\n"
        if not plan.exists() or plan.read_text() != text:  # another step may run beside this one
            write_whole(plan, text)

    # --- steps -------------------------------------------------------------------------------

    def tasks(self, step: str) -> Iterator[list[Task]]:
        """What is to be done, part by part: a later part may need what an earlier one made."""
        size = self.size
        match step:
            case "collect":
                yield self._collect("collect", "gains") if size.collected else []
                yield self._collect("listen", MOMENTS) if size.collected else []
            case "fit":
                yield [self._fit(HASTY, ["--hasty"])]
                yield [self._waiting(HASTY)]
                yield [self._fit(name, waits=HASTY) for name in self.trained("fit")]
            case "train":
                yield [self._train(name, seed, f"fit-{seed}")
                       for seed, name in enumerate(self.both)]  # fmt: skip
            case "rules":
                heats, (first, more) = size.heats, size.heats.worlds
                specs = [spec for kind in RULES for spec in heats.specs(kind)]
                yield self._judge("rules", [TRAINING], specs, heats.cases, 0, first)
                best = finalists(self.out / "rules", heats)
                yield self._judge("rules", [TRAINING], best, heats.cases, first, more)
                keep_tuned(self.out / TUNED, tuned(self.out / "rules", heats))
            case "validate":
                self._keep_wary()
                who, many = self.named(self.candidates), size.validation
                yield self._judge("validated", [VALIDATION], who, size.validated, worlds=many)
                self._choose()
            case "judge":
                yield self._judge("judged", size.groups, [*self.rules, *self.named(self.reported)])
            case "garden":
                yield self._judge("judged", [GARDEN], [SPECIALIST, *self.named(self.learners)])
            case "own":
                yield [] if size.own is None else [self._own()]
            case "ablate":
                # Those that do not see something do not see it either when waiting is judged.
                blind = {kind: ["--ablation", what] for kind, what in BLIND.items()}
                blind = blind if size.ablated else {}
                yield [self._fit(f"{kind}-{HASTY}", [*more, "--hasty"])
                       for kind, more in blind.items()]  # fmt: skip
                yield [self._waiting(f"{kind}-{HASTY}", more) for kind, more in blind.items()]
                yield [
                    self._fit(name, more, self._waits(name)) for name, more in self.lacking.items()
                ]
                yield [self._train(name, seed)
                       for seed, name in enumerate(self.trained("ppo", size.alone))]  # fmt: skip
            case "judge-ablations":
                yield self._judge("judged", size.groups, self.named(self._ablated()))

    def _collect(self, command: str, folder: str) -> list[Task]:
        plots, parts = self.size.collected or 0, greenhouse_gains.PLOTS_OF_PART
        words = [command, "--plots", str(plots), "--cases", str(self.size.cases_of_plot)]
        enough = lambda: len(list((self.out / folder).glob("gains-*.npz"))) * parts >= plots  # noqa: E731
        return self._shared([*words, *self._common(folder)], enough)

    def _fit(self, name: str, more: Sequence[str] = (), waits: str | None = None) -> Task:
        epochs = int(more[more.index("--epochs") + 1]) if "--epochs" in more else self.size.epochs
        words = ["fit", *self._common(name, name.rpartition("-")[2]), "--epochs", str(epochs)]
        words += ["--gains", *map(str, self._gains("--contexts" in more)), *more]
        words += [] if waits is None else ["--waiting", str(self.out / f"{waits}-{WAITING}")]

        done = self.out / name / greenhouse.DONE  # what it goes on from need not be there any more
        over = lambda: done.exists() and len(json.loads(done.read_text())) >= epochs  # noqa: E731
        return Task(words, over, needs_gains=True)

    def _waits(self, name: str) -> str | None:
        """By which fit an ablation is told what waiting is worth."""
        kind = name.rpartition("-")[0]
        return f"{kind}-{HASTY}" if kind in BLIND else None

    def _waiting(self, fitted: str, more: Sequence[str] = ()) -> Task:
        """What waiting is worth to who chooses as this fit does, and sees as much."""
        moments = [self.out / MOMENTS]
        if not self.size.collected:
            moments = self._collected_before("moments-*")
        name = f"{fitted}-{WAITING}"
        words = ["waiting", *self._common(name), "--fitted", str(self.folder(fitted)), *more]
        words += ["--gains", *map(str, self._gains(False)), "--moments", *map(str, moments)]
        return Task(words, partial(is_saved, self.out / name), needs_gains=True)

    def _gains(self, one_collection: bool) -> list[Path]:
        """List the files of measured gains.

        Args:
            one_collection: Return only the collection of random seeds. Every collection numbers its
                plots from 0, so a fit to a given number of plots must read a single collection.
        """
        if self.size.collected:
            return [self.out / "gains"]
        return self._collected_before("gains-seed2-*" if one_collection else "gains-*")

    def _collected_before(self, pattern: str) -> list[Path]:
        """List the matching files of `self.gains`; none if no folder was named."""
        if self.gains is None:
            return []
        return sorted(self.gains.glob(f"{pattern}.xz"))

    def require_gains(self, tasks: Sequence[Task]) -> None:
        """Raise an error if one of the tasks reads measured gains and no folder has them."""
        if self.size.collected or not any(task.needs_gains for task in tasks):
            return
        missing = [name for name in ("gains-*", "moments-*") if not self._collected_before(name)]
        if missing:
            raise DataError(
                "This step needs measured gains, which are not in the repository",
                given=f"no {' and no '.join(missing)} in {self.gains or 'any folder'}",
                valid="--gains FOLDER",
                fix="see docs/greenhouse.md, section 'Measured gains', for how to get them",
            )

    def _train(self, name: str, seed: int, fitted: str | None = None) -> Task:
        state, rounds = self.out / name / "state.json", self.size.rounds
        words = ["train", *self._common(name, str(seed)), "--rounds", str(rounds), *self.size.round]
        if fitted is not None:
            words += ["--fitted", str(self.folder(fitted))]
        over = lambda: state.exists() and len(json.loads(state.read_text())) >= rounds  # noqa: E731
        return Task(words, over, min(self.ranks, self.processes))

    def _judge(
        self,
        folder: str,
        groups: Sequence[str],
        who: Sequence[str],
        cases: int | None = None,
        first: int = 0,
        worlds: int | None = None,
    ) -> list[Task]:
        require_open(groups, self.final)
        cases, worlds = cases or self.size.cases, worlds or self.size.worlds
        words = ["judge", *who, *self._common(folder), "--group", *groups, "--cases", str(cases)]
        words += ["--first", str(first), "--rows", str(self.size.rows)]
        words += ["--worlds", str(worlds)] if worlds else []
        words += ["--final"] if self.final else []

        def over() -> bool:
            made = {(name_of(word), fingerprint_of(controller_of(word))) for word in who}
            for group in groups:
                numbers = numbers_of(group, first, worlds)
                played = {
                    (net.controller, net.world, net.case)
                    for net in read_judged(self.out / folder, group)
                    if (net.controller, net.made) in made and net.world in numbers
                }
                if len(played) < len(made) * len(numbers) * cases:
                    return False
            return True

        return self._shared(words, over)

    def _own(self) -> Task:
        if not self.final:
            raise SystemExit("The tasks of group 'own' are held out: --final says all is chosen.")
        runs, who = self.out / OWN, [*self.rules, *self.named(self.learners)]
        words = ["--runs", str(runs), "--jobs", str(self.processes), *(self.size.own or ())]

        def over() -> bool:
            whole = runs / OWN_OVER
            return whole.exists() and json.loads(whole.read_text()) == list(map(name_of, who))

        words += ["--final", "--controllers", *who]
        return Task(words, over, self.processes, "benchmarks/own.py")

    def _shared(self, words: list[str], over: Callable[[], bool]) -> list[Task]:
        shares = [[*words, "--place", str(place), "--of", str(self.processes)]
                  for place in range(self.processes)]  # fmt: skip
        return [Task(share, over) for share in shares]

    def _common(self, folder: str, seed: str = "0") -> list[str]:
        where = ["--out", str(self.out / folder), "--device", self.device, "--seed", seed]
        return [*where, "--longest", str(self.size.longest)]

    def _keep_wary(self) -> None:
        """Fits to which planting seems less likely by the reserve."""
        for fitted, wary in zip(self.trained("fit"), self.trained("wary"), strict=True):
            if self.folder(wary).exists():
                continue
            saved = load_saved(self.folder(fitted))
            saved.network.bias_action_logit("op", LifecycleOp.GERMINATE, -RESERVE)
            card = {**saved.card, "reserve": RESERVE}
            save_controller(saved.network, self.folder(wary), None, card, rule=saved.rule)

    def _choose(self) -> None:
        """Of a training's candidates, on validation worlds: of those that do little enough harm the
        one that gains most; the least harmful one if all do more."""
        points: dict[str, list[float]] = {}
        names = self.candidates
        made = {name: fingerprint_of(controller_of(word))
                for name, word in zip(names, self.named(names), strict=True)}  # fmt: skip
        for net in read_judged(self.out / "validated", VALIDATION):
            if made.get(net.controller) == net.made and net.world < self.size.validation:
                points.setdefault(net.controller, []).append(net.points)
        means = {name: fmean(own) for name, own in points.items()}
        harms = {name: fmean(each < -HARM for each in own) for name, own in points.items()}
        found = {}
        for seed in range(self.size.trainings):
            ours = [name for name in means if name.endswith(f"-{seed}")]
            least = max(min(harms[name] for name in ours), EXPECTED_HARM)
            best = max((name for name in ours if harms[name] <= least), key=means.__getitem__)
            found[best] = {name: [means[name], harms[name]] for name in ours}
        write_whole(self.out / CHOSEN, json.dumps(found, indent=1) + "\n")

    def _ablated(self) -> list[str]:
        """All that were trained to lack something; who may plant once are the learners again."""
        once = []
        for number, name in enumerate(self.learners):
            kept = load_saved(self.folder(name))
            once.append(f"one_shot-{number}")
            card = {**kept.card, ABLATION: ONE_SHOT}
            if not self.folder(once[-1]).exists():
                save_controller(kept.network, self.folder(once[-1]), None, card, rule=kept.rule)
        return [HASTY, *self.lacking, *self.trained("ppo", self.size.alone), *once]
