"""What a report says in sentences."""

from esper.karn.report.facts import Facts, Score


def headline(facts: Facts) -> str:
    """What was learned, with its figures."""
    done = _done(facts)
    best = facts.best
    if best is None:
        if not facts.played:
            return f"Nothing has been played yet.{_baseline_words(facts)}"
        return f"{done} the controller has not been evaluated yet.{_baseline_words(facts)}"
    compared = [
        f"{_relation(best, score)} {_article(name)} ({score})"
        for name, score in facts.baselines.items()
    ]
    compared.append(f"{_relation(best, Score(0, 0.0, 0.0, 0.0, None))} never growing (0)")
    return f"{done} Tamiyo scores {best} at its best, in round {best.round}: {_listed(compared)}."


def cautions(facts: Facts) -> list[str]:
    """What a reader should know before believing the figures, and what is missing."""
    found = []
    best = facts.best
    if best is not None:
        last = facts.learned[-1]
        if len(facts.learned) > 1:
            found.append(
                "The best evaluation is chosen from "
                f"{len(facts.learned)} by the very figure that is shown, which flatters it a "
                f"little; the latest is {last} (round {last.round})."
            )
        if best.low is None:
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
        rounds = ", ".join(str(number) for number in facts.resumed_after)
        found.append(f"The run was resumed after round {rounds}.")
    if facts.dropped:
        lost = ", ".join(f"{count:,} of {what}" for what, count in facts.dropped.items())
        found.append(f"Telemetry lost events on the way: {lost}.")
    if facts.played and not facts.updates:
        found.append("Episodes were recorded but no update, so part of the telemetry is missing.")
    envs = facts.setting("envs")
    short = [each.round for each in facts.rounds if 0 < each.episodes < (envs or 0)]
    if isinstance(envs, int) and short:
        found.append(
            f"In {len(short)} of {facts.last_round} rounds there are fewer episodes than the "
            f"{envs} environments: the last may still be played; otherwise telemetry is missing."
        )
    found += [f"Round {number}: {text}" for number, text in facts.notes]
    return found


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "not recorded"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _done(facts: Facts) -> str:
    time = "" if facts.training_seconds is None else f" and {duration(facts.training_seconds)}"
    rounds = "1 round" if facts.last_round == 1 else f"{facts.last_round:,} rounds"
    return f"After {facts.played:,} episodes in {rounds}{time},"


def _relation(best: Score, other: Score) -> str:
    """What the intervals allow to say."""
    if None in (best.low, best.high, other.low, other.high):
        return "more than" if best.value > other.value else "not more than"
    assert best.low is not None
    assert best.high is not None
    assert other.low is not None
    assert other.high is not None
    if best.low > other.high:
        return "clearly above"
    if best.high < other.low:
        return "clearly below"
    return "not distinguishable from"


def _article(name: str) -> str:
    return {"random": "random decisions", "heuristic": "the heuristic"}.get(name, name)


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _baseline_words(facts: Facts) -> str:
    if not facts.baselines:
        return ""
    found = [f"{_article(name)} {score}" for name, score in facts.baselines.items()]
    return f" To compare with: {_listed(found)}; never growing is 0."
