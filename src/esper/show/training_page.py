"""The page of a training run: what it says in sentences, its figures and tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from esper.show.page import NOTHING, Markup, Section, assembled, fill, fill_each
from esper.show.run_facts import Facts, Row, Score, signed
from esper.show.terminal import duration, listed


def page(facts: Facts, sections: Sequence[Section]) -> str:
    """The whole page as HTML."""
    anomalies = fill_each("anomaly", facts.anomalies)
    absent, settings = _settings(facts)
    listed = fill("anomalies", rows=anomalies) if anomalies else ""
    return assembled(
        f"run {facts.path.resolve().name}",
        headline(facts),
        _tiles(facts),
        sections,
        cautions=cautions(facts),
        settings=settings,
        absent=absent,
        more=Markup(_attribution(facts.attribution) + listed),
    )


def _tiles(facts: Facts) -> list[dict[str, str]]:
    """The few numbers that people look for first."""
    best, planned = facts.best, facts.setting("rounds")
    scores = {} if best is None else {"best evaluation": best}
    tiles = [
        {
            "what": name,
            "value": signed(score.value),
            "more": f"95 %: {score.spoken_interval}" if score.interval else "no interval",
        }
        for name, score in (scores | dict(facts.baselines)).items()
    ]
    rounds = f"{facts.last_round:,}" + (f" of {planned:,}" if planned else "")
    time = duration(facts.training_seconds)
    return [
        *tiles,
        {"what": "rounds", "value": rounds, "more": f"{facts.played:,} episodes"},
        {"what": "training time", "value": time, "more": "with evaluations"},
    ]


def _attribution(seeds: Sequence[Row]) -> Markup:
    """What each seed of the best episode was worth; nothing if that was not found out."""
    if not seeds:
        return NOTHING
    figures = ("score", "shapley", "left_out")
    rows = [{**row, **{name: signed(row[name]) for name in figures}} for row in seeds]
    return fill("attribution", **rows[0], rows=fill_each("attributed", rows))


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
    found = []
    if len(facts.learned) > 1:
        last = facts.learned[-1]
        found.append(
            f"The best evaluation is chosen from {len(facts.learned)} by the very figure that is "
            f"shown, which flatters it a little; the latest is {last} (round {last.round})."
        )
    if facts.best is not None and facts.best.interval is None:
        found.append(
            "There are no intervals: with one case of each context nothing is known about the "
            "spread. Set evaluation.seeds to 2 or more."
        )
    if not facts.baselines:
        found.append("No baseline was evaluated, so there is only never growing to compare with.")
    planned = facts.setting("rounds")
    if isinstance(planned, int) and facts.last_round < planned:
        found.append(f"The run is not finished: {facts.last_round} of {planned} rounds so far.")
    if facts.rolled_back:
        found.append(
            f"{facts.rolled_back:,} of {facts.played:,} episodes failed and were rolled back."
        )
    if facts.resumed_after:
        rounds = ", ".join(map(str, facts.resumed_after))
        found.append(f"The run was resumed after round {rounds}.")
    if facts.dropped:
        lost = ", ".join(f"{count:,} of {what}" for what, count in facts.dropped.items())
        found.append(f"Telemetry lost events on the way: {lost}.")
    if facts.played and not facts.updates:
        found.append("Episodes were recorded but no update, so part of the telemetry is missing.")
    envs = facts.setting("envs")
    short = [each for each in facts.rounds if each["episodes"] < (envs or 0)]
    if isinstance(envs, int) and short:
        found.append(
            f"In {len(short)} of {facts.last_round} rounds there are fewer episodes than the "
            f"{envs} environments: the last may still be played; otherwise telemetry is missing."
        )
    found += [f"Round {number}: {text}" for number, text in facts.notes]
    return found


def _relation(best: Score, other: Score) -> str:
    """What the intervals allow to say."""
    if best.interval is None or other.interval is None:
        return "more than" if best.value > other.value else "not more than"
    if best.interval[0] > other.interval[1]:
        return "clearly above"
    return "clearly below" if best.interval[1] < other.interval[0] else "not distinguishable from"


def _article(name: str) -> str:
    return {"random": "random decisions", "heuristic": "the heuristic"}.get(name, name)
