"""Does learning to grow pay? Tamiyo against schedules, rules, a bandit and the oracle.

Stage by stage, each kept in the study's folder: rules are tuned, agents are trained side by side,
and everything is played on cases that nothing was trained, tuned or chosen on. What the atlas knows
is known to all: best constant and oracle are its schedules, rules plant what it recommends, the
bandit is fitted to it, and it teaches the agents before they learn by themselves.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from esper.distributed import SINGLE_PROCESS
from esper.garden import Atlas, Draw, Garden, Suite, find_suite, shipped_atlas
from esper.garden.atlas import MEASURED
from esper.garden.controller_choice import Renamed, controller_of
from esper.garden.dealing import Ranks
from esper.garden.evaluation import evaluate, fingerprint_of
from esper.garden.playing import Controls, Playground, StoppedError
from esper.leyline import DEFAULT_EPISODE_LENGTH, DataError, UnknownNameError
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training.config import changed_settings
from esper.tamiyo.controllers import Controller, LearnedController, make_controller
from esper.tamiyo.controllers.learned import save_controller
from studies.bandit import fit_bandit
from studies.cohort import Cohort, MemberReport, MemberSettings, shares
from studies.folders import DESCRIPTION, RESULTS, Clock, StudyFolder, Tell
from studies.sizes import SIZES, C2Size
from studies.teacher import Teacher
from studies.tuning import Tuned, tune

TUNED_FILE, CURVES_FILE, BOUND_TO = "tuned.json", "curves.json", "bound-to.json"
COHORT, APPRENTICES = "cohort", "apprentices"
LAST = 3  # rounds by which the best training is chosen
TAMIYO, BLANKED, UNTAUGHT = "tamiyo", "blanked", "untaught"


def run_c2(
    folder: Path,
    size: str = "quick",
    device: torch.device | str = "cpu",
    *,
    tell: Tell = lambda what, done, total: None,
    seconds: float | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> bool:
    """Go on with the study in `folder`; False if the time was over before it was finished.

    `ranks` that all call it share the work; the first of them writes.
    """
    if size not in SIZES:
        raise UnknownNameError.of("size", size, SIZES)
    kept = StudyFolder(folder, ranks)
    with kept.locked():
        return _Study(kept, SIZES[size], device, tell, Clock(seconds)).run()


def digest_of(atlas: Atlas) -> str:
    """Tells atlases apart: another measurement has another one."""
    found = hashlib.blake2b(repr((atlas.arms, atlas.plans)).encode(), digest_size=8)
    for name in MEASURED:
        found.update(getattr(atlas, name).float().contiguous().numpy().tobytes())
    return found.hexdigest()


def episodes_of(atlas: Atlas) -> int:
    """How many were played for it, controls and searches included."""
    searched = 0 if atlas.plans is None else atlas.plans.episodes
    return atlas.control.numel() + atlas.gain.numel() + searched


class _Study:
    """The stages, in order; each finds what was done before."""

    def __init__(
        self, kept: StudyFolder, size: C2Size, device: torch.device | str, tell: Tell, clock: Clock
    ) -> None:
        self.kept, self.folder, self.ranks = kept, kept.path, kept.ranks
        self.size, self.device = size, torch.device(device)
        self.tell, self.clock = tell, clock
        self.suite: Suite = find_suite(size.suite)
        found = shipped_atlas(self.suite)
        if found is None:
            raise DataError(f"Suite {self.suite.name!r} has no atlas", fix="measure one first")
        self.atlas: Atlas = found
        self.controls = Controls(horizon=DEFAULT_EPISODE_LENGTH, device=device)

    def run(self) -> bool:
        self._require_own_folder()
        tuned = self._tuned()
        cohort = self._trained()
        if cohort is None:
            return False
        controllers, searches = self._controllers(tuned, cohort)
        known = [
            *controllers,
            controller_of("oracle", self.suite, self.atlas),
            *self._apprentices(),
        ]
        heldout = [each for contexts in self.suite.heldout.values() for each in contexts]
        try:
            evaluate(known, self.suite.training, **self._evaluation())
            evaluate(controllers, heldout, **self._evaluation())
        except StoppedError:
            return False
        if self.ranks.rank == 0:
            self._describe(tuned, searches, known)
            self._keep_best(cohort)
        return True

    def _require_own_folder(self) -> None:
        """A folder belongs to one size and one atlas: what it holds is not mixed with others'."""
        ours = {"size": asdict(self.size), "atlas": digest_of(self.atlas)}
        bound = self.kept.kept(BOUND_TO, lambda: ours)
        if bound["atlas"] != ours["atlas"] or changed_settings(self.size, bound["size"]):
            raise DataError(
                f"{self.folder} holds a study of another size or of another atlas",
                fix="name another folder with --out",
            )

    def _evaluation(self) -> dict[str, Any]:
        return {
            "ground": Playground(self.size.at_once, device=self.device, ranks=self.ranks),
            "seeds": self.size.episodes,
            "file": self.folder / RESULTS,
            "controls": self.controls,
            "progress": self.tell,
            "stop": lambda: self.clock.over,
        }

    def _tuned(self) -> dict[str, Tuned]:
        """The best rule of each kind, tuned once."""

        def make() -> dict[str, Any]:
            found = tune(
                self.atlas,
                self.suite,
                size=self.size.tuning,
                rows=self.size.at_once,
                device=self.device,
                controls=self.controls,
                tell=self.tell,
                ranks=self.ranks,
            )
            return {kind: tuned.to_dict() for kind, tuned in found.items()}

        stored = self.kept.kept(TUNED_FILE, make)
        return {kind: Tuned(**{**each, "log": ()}) for kind, each in stored.items()}

    def _members(self) -> list[MemberSettings]:
        size = self.size
        main = [
            MemberSettings(name=f"{TAMIYO}-{n}", rows=size.rows, seed=n)
            for n in range(size.trainings)
        ]
        blanked = [
            MemberSettings(name=f"{BLANKED}-{n}", rows=size.other_rows, seed=100 + n, blanked=True)
            for n in range(size.blanked)
        ]
        untaught = [
            MemberSettings(
                name=f"{UNTAUGHT}-{n}", rows=size.other_rows, seed=200 + n, apprentice=False
            )
            for n in range(size.untaught)
        ]
        return [*main, *blanked, *untaught]

    def _trained(self) -> Cohort | None:
        """All agents, trained; None if the time was over before."""
        members = self._members()
        own = shares(members, self.ranks.size)[self.ranks.rank]
        first, rows = (sum(m.rows for m in some) for some in (members[: own.start], members[own]))
        draw = Draw(contexts=self.suite.training, seeds=self.size.cases, first_row=first)
        if self.ranks.size > 1:  # each would measure its own, and some of them twice
            self.controls.require(draw.pool(), self.ranks)
        garden = Garden(draw, max(1, rows), controls=self.controls)
        teacher = teacher_of(self.atlas)
        who: dict[str, Any] = {"ranks": self.ranks, "share": own, "device": self.device}
        cohort = Cohort(garden, members, self.size.cohort, teacher=teacher, **who)
        cohort.load(self.folder / COHORT)
        curves = self.kept.read_or_none(CURVES_FILE) or {each.name: [] for each in members}
        for points in curves.values():  # what a lost round had told
            del points[cohort.round :]
        rounds = cohort.settings.rounds
        while not cohort.over:
            played = [(report.name, _point(report)) for report in cohort.one_round()]
            for points_of_rank in self.ranks.all_gather_object(played):
                for name, point in points_of_rank:
                    curves[name].append(point)
            self.tell("training, rounds", cohort.round, rounds)
            if cohort.round == cohort.settings.lesson_rounds:
                for member in cohort.members:
                    if member.settings.apprentice:
                        member.agent.save(self.folder / APPRENTICES / member.name)
            stopping = any(self.ranks.all_gather_object(self.clock.over))
            if stopping or cohort.over or cohort.round % self.size.save_every == 0:
                self.kept.write(CURVES_FILE, curves)
                cohort.save(self.folder / COHORT)
            if stopping:
                return None
        return cohort

    def _apprentices(self) -> list[Controller]:
        """Tamiyo as it was when its teacher left, to see what it learned by itself."""
        return [
            LearnedController(
                PPOAgent.load(
                    self.folder / APPRENTICES / f"{TAMIYO}-{n}", device=self.device
                ).network,
                name=f"apprentice-{n}",
            )
            for n in range(self.size.trainings)
        ]

    def _controllers(
        self, tuned: dict[str, Tuned], cohort: Cohort
    ) -> tuple[list[Controller], dict[str, Any]]:
        """What can be played anywhere, and how the bandit's rules did on other seeds."""
        bandit, log = fit_bandit(self.atlas, rows=self.size.at_once, device=self.device)
        found = cohort.networks(self.folder / COHORT)
        learned = [LearnedController(network, name=name) for name, network in found.items()]
        return [
            make_controller("never"),
            make_controller("random"),
            controller_of("best_constant", self.suite, self.atlas),
            *(Renamed(make_controller(each.spec), kind) for kind, each in tuned.items()),
            bandit,
            *learned,
        ], log

    def _keep_best(self, cohort: Cohort) -> None:
        """The training that did best on its own cases, as a controller."""
        name = best_training(self.kept.read(CURVES_FILE))
        network = cohort.networks(self.folder / COHORT)[name]
        catalogue = cohort.garden.catalogue
        card = card_of(self.kept.read(DESCRIPTION), name)
        save_controller(network, self.folder / TAMIYO, catalogue, card)

    def _describe(
        self, tuned: dict[str, Tuned], bandit: dict[str, float], controllers: Sequence[Controller]
    ) -> None:
        atlas, size, measured = self.atlas, self.size, episodes_of(self.atlas)
        rounds, contexts = size.cohort.rounds, len(self.suite.training)
        # The atlas is counted for whoever is made from it or taught by it.
        episodes = dict.fromkeys(("best_constant", "oracle", "bandit"), measured)
        episodes |= {kind: each.episodes + measured for kind, each in tuned.items()}
        for member in self._members():
            taught = measured if member.apprentice else 0
            episodes[member.name] = member.rows * rounds + taught
        groups = {"training": self.suite.training, **self.suite.heldout}
        self.kept.write(
            DESCRIPTION,
            {
                "suite": self.suite.name,
                "groups": {
                    name: [each.name for each in members] for name, members in groups.items()
                },
                "made": {each.name: fingerprint_of(each) for each in controllers},
                "episodes": episodes,
                "atlas_episodes": measured,
                "controls": contexts * size.cases,
                "specs": {
                    "best_constant": [str(arm) for arm in atlas.constant()],
                    **{kind: each.spec for kind, each in tuned.items()},
                },
                "best_heuristic": max(tuned, key=lambda kind: tuned[kind].score),
                "curves": {
                    name: [[point["episodes"], point["score"]] for point in points]
                    for name, points in self.kept.read(CURVES_FILE).items()
                },
                "searches": {"bandit": bandit, "rules": self.kept.read(TUNED_FILE)},
                "size": json.loads(json.dumps(asdict(size))),
            },
        )


def best_training(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Tamiyo's training with the best mean score over its last rounds, on its own cases."""
    names = [name for name in curves if name.startswith(f"{TAMIYO}-")]
    return max(names, key=lambda name: sum(point["score"] for point in curves[name][-LAST:]))


def card_of(study: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What a user of the controller should know: what it was trained on, and what that cost."""
    points = study["curves"][name]
    return {
        "name": TAMIYO,
        "training": name,
        "suite": study["suite"],
        "contexts": study["groups"]["training"],
        "episodes": study["episodes"][name] - study["atlas_episodes"],
        "atlas_episodes": study["atlas_episodes"],
        "training_score": sum(score for _, score in points[-LAST:]) / LAST,
        "limits": (
            "Made for hosts with these slots and blueprints and for episodes of "
            f"{DEFAULT_EPISODE_LENGTH} epochs; decides once per epoch, from validation data; "
            "refuses other numbers of slots and other blueprints."
        ),
    }


def teacher_of(atlas: Atlas) -> Teacher:
    """The atlas's schedules; before a task changes, those of the same task that does not.

    Where that task is not among the contexts the teacher waits: nothing is known to pay there.
    """
    known = dict(zip(atlas.contexts, atlas.schedules(), strict=True))
    still = {(each.source, each.lesion): plan for each, plan in known.items() if each.drift is None}
    before = {
        each.name: still.get((each.source, each.lesion), ())
        for each in atlas.contexts
        if each.drift is not None
    }
    return Teacher({context.name: plan for context, plan in known.items()}, before)


def _point(report: MemberReport) -> dict[str, Any]:
    """What a learning curve is drawn from."""
    metrics = report.metrics
    return {
        "round": report.round,
        "episodes": report.episodes,
        "score": report.score,
        "acted": report.acted,
        "missed": report.missed,
        "kl": None if metrics is None else metrics["kl"],
        "explained_variance": None if metrics is None else metrics["explained_variance"],
    }
