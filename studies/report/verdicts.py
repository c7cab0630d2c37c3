"""What may be said: every claim with its numbers, and whether the numbers bear it out."""

from dataclasses import dataclass, replace

from esper.garden.evaluation import HARM
from esper.garden.statistics import Estimate
from esper.leyline.constants import DEFAULT_RENT
from studies.growth_pays import (
    NEVER,
    RANDOM_GROWTH,
    SCRATCH,
    SCRATCH_FLOPS,
    SCRATCH_PLAIN,
    SMALL,
    SMALL_FLOPS,
)
from studies.report.growth import GrowthStudy
from studies.report.learning import (
    APPRENTICE,
    BANDIT,
    BLANKED,
    CONSTANT,
    TAMIYO,
    TRAINING,
    UNTAUGHT,
    LearningStudy,
)

CONFIRMED, NOT_SHOWN, CONTRADICTED = "Confirmed", "Not shown", "Contradicted"
NOT_MEASURED = "Not measured"

GAP_TARGET = 0.5  # of the way from the best constant schedule to the oracle
HARM_TARGET = 0.1  # of episodes, at most
LEAST_TRAININGS = 5
LEAST_OF_A_KIND = 2  # episodes of a context, or seeds: fewer have no spread
LEAST_CONTEXTS = 2  # in which growth has to beat the final architecture from scratch

RIVALS = {
    NEVER: "the small host at the same rate and epochs",
    SMALL: "the small host with its own tuned rate, same epochs",
    SCRATCH_PLAIN: "the final architecture from scratch at the same rate and epochs",
    SCRATCH: "the final architecture from scratch with its own tuned rate, same epochs",
    SMALL_FLOPS: "the small host at equal training FLOPs, tuned",
    SCRATCH_FLOPS: "the final architecture from scratch at equal training FLOPs, tuned",
    RANDOM_GROWTH: "random growth",
}


@dataclass(frozen=True)
class Verdict:
    """A claim, what became of it, and why."""

    state: str
    claim: str
    evidence: str

    def __str__(self) -> str:
        return f"**{self.state}**: {self.claim}. {self.evidence}."


def points(estimate: Estimate) -> str:
    return estimate.text("+.2f", " points")


def share(estimate: Estimate) -> str:
    return f"{estimate:.0%}"


def above(claim: str, lead: Estimate | None, what: str = "Mean difference") -> Verdict:
    """Is a difference above zero, as far as its interval can tell?"""
    if lead is None:
        return Verdict(NOT_MEASURED, claim, "One of the two was not played there")
    state = CONFIRMED if lead.low > 0 else CONTRADICTED if lead.high < 0 else NOT_SHOWN
    return Verdict(state, claim, f"{what}: {points(lead)}")


# --- does learning pay? -----------------------------------------------------------------------


def learning_verdicts(study: LearningStudy) -> list[Verdict]:
    """The claims about Tamiyo, at the primary rent."""
    rule = study.best_heuristic
    verdicts = [
        _trainings(study),
        above(
            "In contexts it was trained in, Tamiyo's net gain is above that of the best constant "
            "schedule",
            study.lead(TRAINING, CONSTANT),
        ),
        above(
            f"There it is above that of the best tuned rule (`{rule}`)", study.lead(TRAINING, rule)
        ),
        _gap(study),
        _harm(study),
    ]
    for group in study.groups:
        if group != TRAINING:
            verdicts.append(
                above(
                    f"In held-out contexts that differ in {group}, Tamiyo's net gain is above that "
                    "of the best constant schedule",
                    study.lead(group, CONSTANT),
                )
            )
    verdicts += [
        _beside(
            study, BLANKED, "Observing pays: Tamiyo is above a learner that sees only the time"
        ),
        _beside(
            study,
            BANDIT,
            "Deciding again and again pays: Tamiyo is above a bandit that decides once",
        ),
    ]
    others = {
        UNTAUGHT: "Being taught pays: Tamiyo is above a learner that has nothing but rewards",
        APPRENTICE: "Rewards add to what was taught: Tamiyo is above what it was before them",
    }
    for rival, claim in others.items():
        if rival in study.controllers:
            verdicts.append(_beside(study, rival, claim))
    return _cautious(verdicts, study.episodes, "episode of each context")


def _cautious(verdicts: list[Verdict], count: int, what: str) -> list[Verdict]:
    """One of a kind has no spread, so nothing follows from it."""
    if count >= LEAST_OF_A_KIND:
        return verdicts
    return [
        replace(
            each,
            state=NOT_SHOWN if each.state in (CONFIRMED, CONTRADICTED) else each.state,
            evidence=f"{each.evidence}; {count} {what} tells nothing",
        )
        for each in verdicts
    ]


def _beside(study: LearningStudy, rival: str, claim: str) -> Verdict:
    """Is Tamiyo above another learner? Says how much each had to learn from."""
    verdict = above(claim, study.lead(TRAINING, rival))
    if rival in study.trainings:
        verdict = _cautious([verdict], len(study.trainings[rival]), "training of it")[0]
    ours, theirs = study.spent(TAMIYO), study.spent(rival)
    if verdict.state == NOT_MEASURED or ours is None or theirs is None:
        return verdict
    return replace(
        verdict,
        evidence=f"{verdict.evidence}; {ours:,.0f} episodes of training against {theirs:,.0f}",
    )


def _trainings(study: LearningStudy) -> Verdict:
    count = len(study.trainings[TAMIYO])
    state = CONFIRMED if count >= LEAST_TRAININGS else NOT_SHOWN
    claim = f"There are at least {LEAST_TRAININGS} independent trainings"
    return Verdict(state, claim, f"{count} were run, and all of them are in the figures")


def _gap(study: LearningStudy) -> Verdict:
    claim = f"Tamiyo closes at least {GAP_TARGET:.0%} of the gap from best constant to oracle"
    closed = study.gap_closed(TRAINING)
    if closed is None:
        return Verdict(NOT_MEASURED, claim, "There is no oracle above the constant schedule")
    evidence = f"It closes {share(closed)}"
    if closed.value < GAP_TARGET:
        state = CONTRADICTED if closed.high < GAP_TARGET else NOT_SHOWN
    else:
        state = CONFIRMED
        if closed.low < GAP_TARGET:
            evidence += f", an interval that reaches below {GAP_TARGET:.0%}"
    return Verdict(state, claim, evidence)


def _harm(study: LearningStudy) -> Verdict:
    claim = f"Growth does harm in fewer than {HARM_TARGET:.0%} of Tamiyo's episodes"
    rate = study.harmful(TAMIYO, TRAINING)
    state = CONFIRMED if rate.value < HARM_TARGET else NOT_SHOWN
    if rate.low >= HARM_TARGET:
        state = CONTRADICTED
    evidence = (
        f"{share(rate)} of them end more than {HARM:g} points below never growing, rent of "
        f"{DEFAULT_RENT:g} included"
    )
    return Verdict(state, claim, evidence)


# --- does growth pay? -------------------------------------------------------------------------


def growth_verdicts(study: GrowthStudy) -> list[Verdict]:
    """The claims about networks that grew: by context, since they differ."""
    verdicts = []
    for rival, words in RIVALS.items():
        for who, name in (
            (study.GROWN, "The grown network at the garden's rate"),
            (study.TUNED, "The grown network, tuned itself,"),
        ):
            if rival in (NEVER, SCRATCH_PLAIN, RANDOM_GROWTH) and who == study.TUNED:
                continue  # those have the garden's rate
            verdicts.append(_counted(study, who, rival, f"{name} is better than {words}"))
    return _cautious(verdicts, study.seeds, "seed")


def _counted(study: GrowthStudy, who: str, rival: str, claim: str) -> Verdict:
    """Confirmed in so many contexts; a claim needs two, or all where there are fewer."""
    leads = {context: study.lead(who, rival, context) for context in study.contexts}
    won = [context for context, lead in leads.items() if lead.low > 0]
    lost = [context for context, lead in leads.items() if lead.high < 0]
    needed = min(LEAST_CONTEXTS, len(leads))
    state = CONFIRMED if len(won) >= needed else NOT_SHOWN
    if len(lost) >= needed and not won:
        state = CONTRADICTED
    values = [lead.value for lead in leads.values()]
    evidence = (
        f"Clearly better in {len(won)} of {len(leads)} contexts, clearly worse in {len(lost)}; "
        f"mean differences from {min(values):+.2f} to {max(values):+.2f} points"
    )
    return Verdict(state, f"{claim}, in at least {needed} contexts", evidence)
