"""The page of a run of `grow`: what it says in sentences, its figures, tables and pictures."""

from collections.abc import Sequence
from dataclasses import replace

from esper.show import page as pages
from esper.show.growth_charts import costs, growth, spoken_flops
from esper.show.growth_facts import Report
from esper.show.model_drawing import drawing
from esper.show.page import NOTHING, Markup, Section, fill, fill_each, sections_of
from esper.show.run_facts import signed
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


def page(facts: Report, sections: Sequence[Section]) -> str:
    """The whole page as HTML."""
    tables = {"run": facts.settings} | ({"versions": facts.versions} if facts.versions else {})
    said = (f"run {facts.name}", headline(facts), tiles(facts), sections)
    return pages.assembled(*said, cautions=cautions(facts), settings=tables)


def head(facts: Report) -> str:
    """What a notebook shows of a run: the page's beginning and its first picture."""
    return pages.inline(headline(facts), tiles(facts), contents(facts)[0])


def tiles(facts: Report) -> list[dict[str, str]]:
    """The few numbers that people look for first."""
    score, before = facts.latest_score, facts.before.get("score")
    found = []
    if score is not None:
        untrained = "" if before is None else f"before training {before:.2f} %"
        found.append({"what": facts.score_name, "value": f"{score:.2f} %", "more": untrained})
    if "test_score" in facts.after:
        test = f"{facts.after['test_score']:.2f} %"
        found.append({"what": "on test data", "value": test, "more": "which nothing looked at"})
    added = f"{facts.host_params:,} + {facts.added:,}"
    more = f"{facts.share:+.1f} %, {facts.limit}"
    found.append({"what": "parameters", "value": added, "more": more})
    planted = f"of {len(facts.seeds)} planted" if facts.seeds else "none was planted"
    found.append({"what": "seeds kept", "value": str(len(facts.grown)), "more": planted})
    spent = duration(sum(facts.seconds.values())) if facts.seconds else "not recorded"
    found.append({"what": "time", "value": spent, "more": facts.where})
    counted = spoken_flops(facts.flops)
    return [*found, {"what": "FLOPs of training", "value": counted, "more": "matrix products"}]


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
    found = []
    if len(facts.epochs) < facts.planned:
        done = f"{len(facts.epochs)} of {facts.planned}"
        found.append(f"The run is not finished: {done} epochs so far.")
    if facts.epochs and "test_score" not in facts.after:
        found.append(
            "Decisions look at the validation data, which flatters their score a little; a test "
            "set (test=) is looked at by nothing but the report."
        )
    if facts.grown:
        found.append(
            "A contribution says how much the score falls if a seed is left out of this network, "
            'not what growing has won: for that, train the same model with controller="never".'
        )
    return found


def _seeds(facts: Report) -> Markup:
    """Every seed that ever lived."""
    rows = fill_each(
        "planted",
        (
            {
                "seed": life.blueprint,
                "slot": life.slot,
                "params": f"{life.params:,}",
                "planted": life.planted,
                "fate": life.course,
                "worth": "—" if life.contribution is None else signed(life.contribution),
            }
            for life in facts.seeds
        ),
    )
    return fill("seeds", rows=rows) if rows else NOTHING


def _decisions(facts: Report) -> Markup:
    """What was decided after which epoch, what passed with time, and why that was possible."""
    rows = []
    for epoch in facts.epochs:
        reasons = dict.fromkeys(reason for _, _, reason in epoch.changes if reason)
        if epoch.news:
            said = {"epoch": epoch.number, "what": "; ".join(epoch.news)}
            rows.append({**said, "why": "; ".join(reasons) or "—"})
    return fill("decisions", rows=fill_each("decided", rows)) if rows else NOTHING
