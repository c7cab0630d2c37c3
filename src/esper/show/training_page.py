"""The page of a training run: what it says in sentences, its figures, tables and pictures.

How to read the pictures is said in `templates/sections.toml`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure

from esper.show import page as pages
from esper.show.page import NOTHING, Markup, Page, Picture, Section, Tile, fill, table
from esper.show.run_facts import BEST, WAITING, Facts, Row, Score, Story, signed
from esper.show.terminal import duration, listed
from esper.show.theme import Theme
from esper.show.timelines import timeline, title
from esper.show.training_charts import action_shares, gain_by_parameters, learning_curve

CHARTS: Mapping[str, Callable[[Facts, Theme], Figure]] = {  # by name of their pictures
    "learning-curve": learning_curve,
    "parameters": gain_by_parameters,
    "actions": action_shares,
}
TIMELINES = "timelines"  # the section whose pictures are episodes
INSIDE_PLAY = ("step", "decide", "tell")
PHASES = {  # in words, and in order
    "step": "train hosts",
    "decide": "decide",
    "tell": "telemetry",
    "play": "other play",  # what is left of it
    "learn": "learn",
    "judge": "evaluate",
}
HEALTH = ("kl", "explained_variance", "entropy", "clip_fraction", "gradient_norms")


def page(facts: Facts) -> Page:
    """The whole page, its pictures not drawn yet."""
    absent, settings = _settings(facts)
    found = [(row["round"], row["message"], row["advice"]) for row in facts.anomalies]
    anomalies = table(("round", "what was seen", "what to do"), found)
    listed = fill("findings", title="Anomalies", reading="", table=anomalies) if found else ""
    return Page(
        name=f"run {facts.path.resolve().name}",
        headline=headline(facts),
        tiles=_tiles(facts),
        sections=contents(facts),
        cautions=cautions(facts),
        settings=settings,
        absent=absent,
        more=Markup(_attribution(facts) + listed),
    )


def _tiles(facts: Facts) -> list[Tile]:
    best, planned = facts.best, facts.config.get("rounds")
    scores = ({} if best is None else {"best evaluation": best}) | dict(facts.baselines)
    rounds = f"{facts.last_round:,}" + (f" of {planned:,}" if planned else "")
    return [
        *(
            Tile(name, signed(each.value), f"95 %: {each.ends}" if each.ends else "no interval")
            for name, each in scores.items()
        ),
        Tile("rounds", rounds, f"{facts.played:,} episodes"),
        Tile("training time", duration(facts.training_seconds), "with evaluations"),
    ]


def _attribution(facts: Facts) -> Markup:
    """What each seed of the best episode was worth; nothing if that was not found out."""
    columns = ("slot", "seed", "Shapley value", "left out")
    rows = [
        (row["slot"], row["blueprint"], signed(row["shapley"]), signed(row["left_out"]))
        for row in facts.attribution
    ]
    if not rows:
        return NOTHING
    first = facts.attribution[0]
    reading = fill("attribution", **{**first, "score": signed(first["score"])})
    named = {"title": "Whose doing the best episode was", "reading": reading}
    return fill("findings", **named, table=table(columns, rows))


def contents(facts: Facts) -> list[Section]:
    """All sections, their pictures not drawn yet."""
    sections = pages.sections_of(
        "sections.toml",
        CHARTS,
        facts,
        late=facts.late_words,
        episodes=f"{len(facts.episodes):,}",
        anomalies="listed below" if facts.anomalies else "none",
    )
    episodes = [_episode(story) for story in facts.stories]
    told = {TIMELINES: replace(sections[TIMELINES], pictures=episodes, absent=_not_told(facts))}
    for name, (found, absent) in {
        "contexts": (
            _contexts(facts),
            "No episode has ended yet, of any context.",
        ),
        "health": (_health(facts), "No update of the learner has been recorded yet."),
        "phases": (_phases(facts), "No times of phases have been recorded."),
    }.items():
        told[name] = replace(sections[name], more=found, absent=[] if found else [absent])
    return [*(sections | told).values()]


def _contexts(facts: Facts) -> Markup:
    """What was planted in each context in the last rounds, and what came of it; most gain first."""
    first: dict[tuple[int, int], Row] = {}  # plantings, by episode
    for row in facts.plantings:
        first.setdefault((row["round"], row["env"]), row)
    rows = []
    for context, episodes in facts.by_context().items():
        grown = [first[key] for row in episodes if (key := (row["round"], row["env"])) in first]
        gain = fmean(row["net_gain"] for row in episodes)
        kinds = Counter(f"{row['blueprint'] or '?'} at {row['slot']}" for row in grown)
        usual = [f"{kind} ({times / len(grown):.0%})" for kind, times in kinds.most_common(1)]
        when = f"{median(row['step'] + 1 for row in grown):g}" if grown else "—"
        waited = f"{1 - len(grown) / len(episodes):.0%}"
        cells = (context, len(episodes), signed(gain, 1), waited, *(usual or ["—"]), when)
        rows.append((gain, cells))
    titles = ("context", "episodes", "mean net gain", "planted nothing", "first seed", "in epoch")
    return table(titles, (cells for _, cells in sorted(rows, reverse=True)))


def _health(facts: Facts) -> Markup:
    """Metrics of updates: how they began, how they are, and the extremes between."""
    rows = []
    for name, curve in sorted(facts.updates.items()):
        values = [value for value in curve.values() if value == value]
        if values and set(name.split(".")) & {*HEALTH}:
            numbers = (values[0], values[-1], min(values), median(values), max(values))
            rows.append((name, *(f"{number:.3g}" for number in numbers)))
    return table(("metric", "first", "last", "lowest", "median", "highest"), rows)


def _phases(facts: Facts) -> Markup:
    spent = seconds_by_phase(facts)
    rows = ((PHASES[n], duration(s), f"{s / sum(spent.values()):.0%}") for n, s in spent.items())
    return table(("phase", "time in all", "share"), rows)


def seconds_by_phase(facts: Facts) -> dict[str, float]:
    """Over all rounds, none counted twice: playing is split into its parts and the rest."""
    spent = {name: sum(facts.seconds[name].values()) for name in PHASES if name in facts.seconds}
    if "play" in spent:
        spent["play"] -= sum(spent.get(name, 0.0) for name in INSIDE_PLAY)
    return spent


def _episode(story: Story) -> Picture:
    row = story.episode
    caption = (
        f"Round {row['round']}, environment {row['env']}, case {row['seed']}; "
        f"{row['interventions'] or 0} decisions other than waiting."
    )
    if story.failure is not None:
        step, reason = story.failure
        caption += f" Rolled back in epoch {step + 1}: {reason}."
    return Picture(f"timeline-{story.kind}", title(story), partial(timeline, story), caption)


def _not_told(facts: Facts) -> list[str]:
    """Which kinds of episodes there are not, and why."""
    told = {story.kind for story in facts.stories}
    if not facts.episodes:
        return ["No episode has ended yet."]
    if not told:
        return ["The decisions of these episodes were not recorded."]
    if WAITING not in told:
        return [f"In {facts.late_words} no episode waited to its end: all planted something."]
    return [] if BEST in told else [f"In {facts.late_words} nothing was planted."]


def _settings(facts: Facts) -> tuple[list[str], dict[str, Row]]:
    """What is not known, and tables of settings and versions."""
    inner = {name: v for name, v in facts.config.items() if isinstance(v, Mapping)}
    plain = {name: v for name, v in facts.config.items() if name not in inner}
    tables: dict[str, Row] = ({"run": plain} if plain else {}) | inner
    absent = [] if tables else ["There is no config.toml."]
    versions = facts.about.get("versions")
    known: dict[str, Any] = dict(versions) if isinstance(versions, Mapping) else {}
    if "machine" in facts.about:
        known["machine"] = facts.about["machine"]
    if known:
        tables["versions"] = known
    else:
        absent.append("The versions of this run were not recorded.")
    return absent, tables


# --- sentences ------------------------------------------------------------------------------


def headline(facts: Facts) -> str:
    """What was learned, with its figures."""
    rounds = "1 round" if facts.last_round == 1 else f"{facts.last_round:,} rounds"
    time = "" if facts.training_seconds is None else f" and {duration(facts.training_seconds)}"
    done = f"After {facts.played:,} episodes in {rounds}{time},"
    best = facts.best
    if best is None:
        said = f"{done} the controller has not been evaluated yet."
        if not facts.played:
            said = "Nothing has been played yet."
        others = [f"{_article(name)} {score}" for name, score in facts.baselines.items()]
        if others:
            said += f" To compare with: {listed(others)}; never growing is 0."
        return said
    compared = [
        f"{_relation(best, score)} {_article(name)} ({score})"
        for name, score in facts.baselines.items()
    ]
    compared.append(f"{_relation(best, Score(0, 0.0, (0.0, 0.0)))} never growing (0)")
    return f"{done} Tamiyo scores {best} at its best, in round {best.round}: {listed(compared)}."


def cautions(facts: Facts) -> list[str]:
    """What a reader should know before believing the figures, and what is missing."""
    best, planned, envs = facts.best, facts.config.get("rounds"), facts.config.get("envs")
    short = sum(each["episodes"] < (envs or 0) for each in facts.rounds)
    holds = {
        "flattered": len(facts.learned) > 1,
        "no_intervals": best is not None and best.interval is None,
        "no_baseline": not facts.baselines,
        "unfinished": isinstance(planned, int) and facts.last_round < planned,
        "rolled_back": facts.rolled_back,
        "resumed": facts.resumed_after,
        "dropped": facts.dropped,
        "no_update": facts.played and not facts.updates,
        "short": isinstance(envs, int) and short,
    }
    found = pages.cautions_of(
        "training",
        holds,
        facts=facts,
        evaluations=len(facts.learned),
        last=facts.learned[-1] if facts.learned else None,
        planned=planned,
        resumed=", ".join(map(str, facts.resumed_after)),
        lost=", ".join(f"{count:,} of {what}" for what, count in facts.dropped.items()),
        short=short,
        envs=envs,
    )
    return found + [f"Round {number}: {text}" for number, text in facts.notes]


def _relation(best: Score, other: Score) -> str:
    """What the intervals allow to say."""
    if best.interval is None or other.interval is None:
        return "more than" if best.value > other.value else "not more than"
    if best.interval[0] > other.interval[1]:
        return "clearly above"
    return "clearly below" if best.interval[1] < other.interval[0] else "not distinguishable from"


def _article(name: str) -> str:
    return {"random": "random decisions", "heuristic": "the heuristic"}.get(name, name)
