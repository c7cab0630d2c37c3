"""The page of a run of `grow`: what it says in sentences, its figures, tables and pictures."""

from dataclasses import replace

from esper.show.growth_charts import costs, growth, spoken_flops
from esper.show.growth_facts import Report
from esper.show.model_drawing import drawing
from esper.show.page import Markup, Page, Section, Tile, cautions_of, sections_of, table
from esper.show.terminal import duration, listed

CHARTS = {"growth": growth, "costs": costs}  # by name of their pictures
EMPTY = {"drawing": "The parts of this model were not recorded.", "seeds": "Nothing was planted."}
EMPTY["decisions"] = "Nothing was decided but to wait."


def contents(facts: Report) -> list[Section]:
    """All sections, their pictures not drawn yet."""
    more = {"drawing": drawing(facts), "seeds": _seeds(facts), "decisions": _decisions(facts)}
    sections = sections_of("growth.toml", CHARTS, facts)
    return [
        replace(section, more=more[name], absent=[] if more[name] else [EMPTY[name]])
        if name in more
        else section
        for name, section in sections.items()
    ]


def page(facts: Report) -> Page:
    """The whole page, its pictures not drawn yet."""
    return Page(
        name=f"run {facts.name}",
        headline=headline(facts),
        tiles=tiles(facts),
        sections=contents(facts),
        cautions=cautions(facts),
        settings={"run": facts.settings} | ({"versions": facts.versions} if facts.versions else {}),
    )


def tiles(facts: Report) -> list[Tile]:
    """The few numbers that people look for first."""
    score, before = facts.latest_score, facts.before.get("score")
    found = []
    if score is not None:
        untrained = "" if before is None else f"before training {before:.2f} %"
        found.append(Tile(facts.score_name, f"{score:.2f} %", untrained))
    if "test_score" in facts.after:
        test = f"{facts.after['test_score']:.2f} %"
        found.append(Tile("on test data", test, "which nothing looked at"))
    added = f"{facts.host_params:,} + {facts.added:,}"
    planted = f"of {len(facts.seeds)} planted" if facts.seeds else "none was planted"
    spent = duration(sum(facts.seconds.values())) if facts.seconds else "not recorded"
    return [
        *found,
        Tile("parameters", added, f"{facts.share:+.1f} %, {facts.limit}"),
        Tile("seeds kept", str(len(facts.grown)), planted),
        Tile("time", spent, facts.where),
        Tile("FLOPs of training", spoken_flops(facts.flops), "matrix products"),
    ]


def headline(facts: Report) -> str:
    """What grew, and what the network came to."""
    kept = [seed.name for seed in facts.grown]
    done = len(facts.epochs)
    epochs = f"{done} epochs" if done == facts.planned else f"{done} of {facts.planned} epochs"
    if not done:
        return "Nothing has been trained yet."
    grew = f"{listed(kept)} grew into the network" if kept else "nothing grew for good"
    cost = f" ({facts.added:,} parameters, {facts.share:+.1f} %)" if kept else ""
    network = "The exported network" if facts.after else "So far the network"
    before = f" ({facts.before['score']:.2f} % before training)" if facts.before else ""
    score = f"{facts.latest_score:.2f} %{before}"
    return f"In {epochs} {grew}{cost}. {network} has {facts.score_name} {score}."


def cautions(facts: Report) -> list[str]:
    """What a reader should know before believing the figures, and what is missing."""
    holds = {
        "unfinished": len(facts.epochs) < facts.planned,
        "untested": facts.epochs and "test_score" not in facts.after,
        "contributions": facts.grown,
    }
    return cautions_of("growth", holds, facts=facts, epochs=len(facts.epochs))


def _seeds(facts: Report) -> Markup:
    """Every seed that ever lived."""
    columns = ("seed", "slot", "parameters", "planted after epoch", "what became of it")
    rows = (
        (life.blueprint, life.slot, f"{life.params:,}", life.planted, life.course, life.worth)
        for life in facts.seeds
    )
    return table((*columns, "contribution"), rows)


def _decisions(facts: Report) -> Markup:
    """What was decided after which epoch, what passed with time, and why that was possible."""
    rows = (
        (
            epoch.number,
            "; ".join(epoch.news),
            "; ".join(dict.fromkeys(reason for *_, reason in epoch.changes if reason)) or "—",
        )
        for epoch in facts.epochs
        if epoch.news
    )
    return table(("after epoch", "what", "what the gates saw"), rows)
