"""The page of a training run: what it says in sentences, its figures, tables and pictures.

How to read the pictures is said in `templates/sections.toml`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from esper.show import page as pages
from esper.show.context_charts import gain_by_parameters, policy_by_context
from esper.show.page import NOTHING, Markup, Page, Picture, Section, Tile, fill, table
from esper.show.run_facts import BEST, WAITING, Facts, Row, Score, Story, signed
from esper.show.terminal import duration, listed
from esper.show.theme import Theme
from esper.show.timelines import timeline, title
from esper.show.training_charts import action_shares, health, learning_curve, phase_times

CHARTS: Mapping[str, Callable[[Facts, Theme], Figure]] = {  # by name of their pictures
    "learning-curve": learning_curve,
    "contexts": policy_by_context,
    "parameters": gain_by_parameters,
    "actions": action_shares,
    "health": health,
    "phases": phase_times,
}
TIMELINES = "timelines"  # the section whose pictures are episodes


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
    best, planned = facts.best, facts.setting("rounds")
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
        anomalies="they are listed below" if facts.anomalies else "in this run there is none",
    )
    episodes = [_episode(story) for story in facts.stories]
    told = replace(sections[TIMELINES], pictures=episodes, absent=_not_told(facts))
    return [*(sections | {TIMELINES: told}).values()]


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
    best, planned, envs = facts.best, facts.setting("rounds"), facts.setting("envs")
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
