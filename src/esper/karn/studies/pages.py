"""The page of evidence, as Markdown: every number and every sentence comes from raw results."""

import math
from collections.abc import Sequence

from esper.karn.studies.growth import GrowthStudy, Peer, Trained
from esper.karn.studies.learning import (
    CONSTANT,
    NEVER,
    ORACLE,
    TAMIYO,
    TRAINING,
    LearningStudy,
    Line,
)
from esper.karn.studies.verdicts import (
    GAP_TARGET,
    HARM_TARGET,
    Verdict,
    growth_verdicts,
    learning_verdicts,
)
from esper.leyline.constants import DEFAULT_RENT, RENT_LEVELS, SCORED_EPOCHS
from esper.simic.garden.evaluation import HARM
from esper.simic.statistics import Estimate, mean, mean_interval, paired_difference
from esper.simic.studies.c1 import CONSTANT as CONSTANT_GROWTH
from esper.simic.studies.c1 import (
    GROWN,
    GROWN_TUNED,
    RANDOM_GROWTH,
    SCRATCH,
    SCRATCH_FLOPS,
    SCRATCH_PLAIN,
    SMALL,
    SMALL_FLOPS,
)
from esper.simic.studies.c1 import (
    NEVER as SMALL_HOST,
)

WAYS = {
    GROWN: "grown, the garden's rate",
    GROWN_TUNED: "grown, tuned",
    SMALL_HOST: "small host, the garden's rate",
    SMALL: "small host, tuned rate",
    SCRATCH_PLAIN: "final architecture from scratch, the garden's rate",
    SCRATCH: "final architecture from scratch, tuned rate",
    SMALL_FLOPS: "small host, equal FLOPs, tuned rate",
    SCRATCH_FLOPS: "final architecture from scratch, equal FLOPs, tuned rate",
    CONSTANT_GROWTH: "grown by one schedule for all contexts",
    RANDOM_GROWTH: "random growth",
}
NOTHING = "–"


def evidence_page(
    growth: GrowthStudy | None, learning: LearningStudy | None, pictures: Sequence[str]
) -> str:
    """The whole page; a study that was not run is named as missing."""
    parts = [
        "# Evidence",
        "*Generated from raw results by `esper study report`; nothing on this page was written by "
        "hand. The flat figures are in `evidence.json`.*",
        "All scores are on test data that neither training, controller nor reward ever saw: "
        f"the mean of the last {SCORED_EPOCHS} epochs of the network that would be exported. "
        "Brackets are 95 % bootstrap intervals. *Confirmed* means that the interval of a "
        "difference excludes zero, *contradicted* that it excludes it on the other side, *not "
        "shown* that it does neither; where a claim names a target, it is judged by that.",
        "## In short",
    ]
    if growth is None:
        parts.append("Whether growth pays has not been studied here (`esper study c1`).")
    else:
        parts += ["**Does growth pay?**", _listed(growth_verdicts(growth))]
    if learning is None:
        parts.append("Whether learning to grow pays has not been studied here (`esper study c2`).")
    else:
        parts += ["**Does learning to grow pay?**", _listed(learning_verdicts(learning))]
    if growth is not None:
        parts += _growth_part(growth, pictures)
    if learning is not None:
        parts += _learning_part(learning, pictures)
    return "\n\n".join(parts) + "\n"


def _listed(verdicts: Sequence[Verdict]) -> str:
    return "\n".join(f"- {verdict}" for verdict in verdicts)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _picture(name: str, words: str, pictures: Sequence[str]) -> list[str]:
    return [f"![{words}]({name}.png)"] if name in pictures else []


def signed(estimate: Estimate | None, digits: int = 1) -> str:
    if estimate is None:
        return NOTHING
    value, low, high = (f"{number:+.{digits}f}" for number in estimate)
    return f"{value} [{low}, {high}]"


def percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return NOTHING
    return f"{estimate.value:.0%} [{estimate.low:.0%}, {estimate.high:.0%}]"


# --- growth -----------------------------------------------------------------------------------


def _growth_part(study: GrowthStudy, pictures: Sequence[str]) -> list[str]:
    about = study.description
    rates = ", ".join(f"{rate:g}" for rate in about["rates"])
    parts = [
        "## Does growth pay?",
        f"`esper study c1 --size {about['size']}`. What grows, where and when was fixed before, on "
        f"other random seeds. Tuned: learning rates (of {rates}) were chosen by validation scores "
        f"on {about['tuning_seeds']} seeds, for architectures from scratch together with how their "
        "seeds start (as torch starts any layer, or as nothing), for the grown network together "
        "with when it is planted (as fixed before, or as early as is allowed). The "
        f"{about['test_seeds']} seeds of the tables are others. All ways share a seed's host "
        "weights and order of data. FLOPs are of training: two for each multiply-add, three "
        "forward passes a step, the second pass of seeds in isolation included. Equal FLOPs are "
        "those of the tuned grown network, to the nearest epoch.",
        *_picture("evidence-growth", "Test accuracy of every way to train", pictures),
    ]
    for context in study.contexts:
        about_context = study.about(context)
        arms, tuned = (
            ", ".join(f"`{arm}`" for arm in named)
            for named in (about_context["arms"], about_context["chosen"][GROWN]["arms"])
        )
        grown = f"Grown: {arms}; tuned: {tuned}."
        parts += [f"### {context}", grown, _growth_table(study, context)]
        parts.append(_survives(study, context))
        edges = [
            WAYS[GROWN_TUNED if name == GROWN else name]
            for name, chosen in about_context["chosen"].items()
            if chosen["edge"]
        ]
        if edges:
            parts.append("At the edge of the rates that were tried: " + ", ".join(edges) + ".")
        parts += _peer_part(study, context)
    return parts


def _survives(study: GrowthStudy, context: str) -> str:
    """How much of the gain is left against a small host that trains as long as it costs."""
    alone, equal = (study.lead(GROWN, rival, context) for rival in (SMALL_HOST, SMALL_FLOPS))
    tuned, tuned_equal = (study.lead(GROWN_TUNED, r, context) for r in (SMALL, SMALL_FLOPS))
    return (
        f"At the garden's rate growth is worth {alone.value:+.1f} points over the small host, and "
        f"{equal.value:+.1f} over one that has equal FLOPs and a rate of its own. With tuned rates "
        f"on both sides it is worth {tuned.value:+.1f} at equal epochs and "
        f"{tuned_equal.value:+.1f} at equal FLOPs."
    )


def _growth_table(study: GrowthStudy, context: str) -> str:
    lines = study.lines(context)
    spent = next(line.flops for line in lines if line.name == GROWN)

    def lead(who: str, line: Trained) -> str:
        return NOTHING if line.name == who else signed(study.lead(who, line.name, context))

    rows = [
        [
            WAYS[line.name],
            f"{line.test.value:.1f} % [{line.test.low:.1f}, {line.test.high:.1f}]",
            lead(GROWN, line),
            lead(GROWN_TUNED, line),
            f"{line.parameters:,.0f}",
            f"{line.flops / spent:.2f}",
            str(line.epochs),
            f"{line.rate:g}" + (f", {line.start} start" if line.start else ""),
        ]
        for line in lines
    ]
    return table(
        (
            "way", "test", "grown is better by", "grown, tuned, is better by",
            "parameters", "FLOPs / grown's", "epochs", "rate",
        ),
        rows,
    )  # fmt: skip


def _peer_part(study: GrowthStudy, context: str) -> list[str]:
    peers = [peer for peer in study.peers if peer.context == context]
    if not peers:
        return []
    ours = {line.name: line.test for line in study.lines(context)}
    rows = [_peer_row(peer) for peer in peers]
    rows += [
        [f"Esper, {WAYS[name]}", f"{ours[name].value:.1f} % [{ours[name].low:.1f}, "
         f"{ours[name].high:.1f}]", NOTHING, NOTHING, NOTHING]
        for name in (GROWN, GROWN_TUNED)
    ]  # fmt: skip
    return [
        "Another library on the same host, data, epochs and batches, with its own tuned rate and "
        "at most as many parameters; seeds are its own, so this is not paired "
        "(`benchmarks/peers/gromo_peer.py`).",
        table(("way", "test", "seeds", "parameters", "rate"), rows),
    ]


def _peer_row(peer: Peer) -> list[str]:
    test = mean_interval([list(peer.tests)])
    return [
        peer.name,
        f"{test.value:.1f} % [{test.low:.1f}, {test.high:.1f}]",
        str(len(peer.tests)),
        f"{peer.parameters:,.0f}",
        f"{peer.rate:g}",
    ]


# --- learning ---------------------------------------------------------------------------------


def _learning_part(study: LearningStudy, pictures: Sequence[str]) -> list[str]:
    trainings = len(study.trainings[TAMIYO])
    parts = [
        "## Does learning to grow pay?",
        f"`esper study c2`. {trainings} independent trainings of Tamiyo; {study.episodes} cases of "
        "each context, or as many as the tables say; whatever is compared is compared on the same "
        "cases. Net gain: points over the paired "
        f"control that never grows, less {DEFAULT_RENT:g} points of rent for 100 % of the host's "
        "parameters over a whole episode. Score: net gain over what can be gained in the context. "
        "Intervals draw trainings and episodes anew; differences are paired. The oracle knows the "
        "context and follows the schedule that was best there on other seeds. Best constant, rules "
        "and oracle were searched on training contexts; the best rule was chosen there, not here. "
        f"Harmful: more than {HARM:g} points below never growing. Targets: {GAP_TARGET:.0%} of the "
        f"gap, harm in fewer than {HARM_TARGET:.0%}.",
    ]
    for group in study.groups:
        kind = "Contexts it was trained in" if group == TRAINING else f"Held out: {group}"
        parts += [f"### {kind}", _controllers(study.lines(group))]
        if group == TRAINING:
            parts += _picture("evidence-profiles", "Performance profiles", pictures)
            parts += _picture("evidence-curves", "Learning curves", pictures)
    parts += ["### Other rents", _rents(study)]
    parts += ["### Context by context", *_picture("evidence-leads", "By context", pictures)]
    parts += [_contexts(study), "### What it cost", _costs(study)]
    if "atlas_episodes" in study.description:
        parts.append(
            f"In all but `untaught` the {study.description['atlas_episodes']:,} episodes of the "
            "atlas are counted: best constant, oracle and bandit are made from it, rules plant "
            "what it recommends, and learners were taught by its schedules first."
        )
    parts += [str(note) for note in study.description.get("notes", ())]
    return parts


def _controllers(lines: Sequence[Line]) -> str:
    rows = [
        [
            f"**{line.controller}**" if line.controller == TAMIYO else line.controller,
            str(line.episodes),
            signed(line.score, 2),
            signed(line.mean_score, 2),
            signed(line.gain),
            percent(line.over_constant),
            percent(line.over_heuristic),
            percent(line.gap_closed),
            percent(line.harmful),
            f"{line.rollbacks:.1%}",
            f"{line.added:,.0f}",
            NOTHING if math.isnan(line.flops) else f"{line.flops:.2f}",
            NOTHING if math.isnan(line.area) else f"{line.area:+.1f}",
        ]
        for line in lines
    ]
    return table(
        (
            "controller", "cases", "score (IQM)", "mean score", "net gain, points",
            "better than best constant", "better than best rule", "gap closed", "harmful",
            "rolled back", "parameters added", "FLOPs / never's", "area, points",
        ),
        rows,
    )  # fmt: skip


def _rents(study: LearningStudy) -> str:
    rows = []
    for group in study.groups:
        for rent in RENT_LEVELS:
            rows.append(
                [
                    group,
                    f"{rent:g}",
                    signed(study.lead(group, CONSTANT, rent)),
                    signed(study.lead(group, study.best_heuristic, rent)),
                    percent(study.gap_closed(group, rent)),
                    percent(study.harmful(TAMIYO, group, rent)),
                ]
            )
    return table(
        (
            "contexts", "rent", "over best constant, points", "over best rule, points",
            "gap closed", "harmful",
        ),
        rows,
    )  # fmt: skip


def _contexts(study: LearningStudy) -> str:
    rivals = [CONSTANT, study.best_heuristic, ORACLE]
    rows = []
    for group, contexts in study.groups.items():
        for context in contexts:
            mine = study.gains(TAMIYO, [context])
            row = [context, group]
            if NEVER in study.played[group]:
                alone = study.results.cube([NEVER], [context], lambda result: result.test)
                row.append(f"{alone.mean():.1f} %")
            else:
                row.append(NOTHING)
            row.append(signed(mean_interval(mine)))
            for name in rivals:
                here = name in study.played[group]
                row.append(f"{study.gains(name, [context]).mean():+.1f}" if here else NOTHING)
            lead = None
            if CONSTANT in study.played[group]:
                pair = (TAMIYO, CONSTANT)
                both = (study.gains(name, [context], beside=pair) for name in pair)
                lead = paired_difference(*both, statistic=mean)
            rows.append([*row, signed(lead)])
    return table(
        (
            "context", "group", "never grown", "Tamiyo, net gain", "best constant", "best rule",
            "oracle", "Tamiyo − best constant",
        ),
        rows,
    )  # fmt: skip


def _costs(study: LearningStudy) -> str:
    specs = study.description.get("specs") or {}
    rows = []
    for name, count in study.description["episodes"].items():
        spec = specs.get(name, "")
        spec = ", ".join(spec) if isinstance(spec, list) else str(spec)
        rows.append([name, f"{count:,}", f"`{spec}`" if spec else NOTHING])
    return table(("controller", "episodes of training or search", "what came of it"), rows)
