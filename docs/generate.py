"""Writes the parts of docs/ that come from code: run it after changing what they show."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import linear_regression
from typing import Any

import esper
from esper.garden import SUITES, Atlas, find_suite
from esper.garden.atlas import ATLAS_EPOCHS, WAIT_MARGIN, shipped_atlas
from esper.kasmina.blueprints import blueprint_names, build_catalogue, find_blueprint
from esper.kasmina.gates import GATES
from esper.kasmina.hosts import HOSTS, build_host
from esper.leyline import (
    DEFAULT_EPISODE_LENGTH,
    DEFAULT_RENT,
    HEADS,
    OCCUPIED_STAGES,
    TRANSITIONS,
    Family,
    LifecycleOp,
    SeedStage,
)
from esper.leyline.catalogue import REMOVED_BLUEPRINTS
from esper.show.palette import STAGE_COLOURS, tint
from esper.tamiyo.controllers import Schedule
from esper.tamiyo.features import GLOBAL_FEATURES, FeatureTable
from esper.tamiyo.token_layout import CANDIDATE_TOKEN, WHOLE_TOKEN

HERE = Path(__file__).parent
PLACES = "places.md"
S = SeedStage

# Where each stage is drawn: column and row. Arrows and their labels come from the tables.
POSITION = {
    S.DORMANT: (0, 0),
    S.GERMINATED: (1, 0),
    S.TRAINING: (2, 0),
    S.BLENDING: (3, 0),
    S.HOLDING: (4, 0),
    S.FOSSILIZED: (5, 0),
    S.PRUNED: (3, 1),
    S.EMBARGOED: (2, 1),
    S.RESETTING: (1, 1),
}
STRENGTH = 0.4  # of a stage's colour on white
MEANING = {
    S.DORMANT: "empty slot",
    S.GERMINATED: "planted",
    S.TRAINING: "learns in isolation",
    S.BLENDING: "alpha 0 → 1",
    S.HOLDING: "on probation",
    S.FOSSILIZED: "permanent",
    S.PRUNED: "alpha → 0",
    S.EMBARGOED: "removed, resting",
    S.RESETTING: "almost free",
}
WIDTH, HEIGHT, STEP_X, STEP_Y, LEFT, TOP = 128, 50, 204, 130, 24, 30


def label_of(after: SeedStage) -> str:
    gate = next(gate for gate in GATES if gate.after is after)
    if gate.op is not None:
        return gate.op.name
    return "at once" if after is S.TRAINING else "time"


def corner(stage: SeedStage) -> tuple[int, int]:
    column, row = POSITION[stage]
    return LEFT + column * STEP_X, TOP + row * STEP_Y


def arrow(before: SeedStage, after: SeedStage) -> str:
    """One edge: straight in a row, over a common line down to PRUNED, or up from RESETTING."""
    (x0, y0), (x1, y1) = corner(before), corner(after)
    half_width, half_height = WIDTH // 2, HEIGHT // 2
    text = None
    if y0 == y1:
        start, end = (x0 + WIDTH, x1 - 3) if x1 > x0 else (x0, x1 + WIDTH + 3)
        path = f"M{start},{y0 + half_height} H{end}"
        text = ((start + end) // 2, y0 + half_height - 7)
    elif y1 > y0:
        turn = (y0 + HEIGHT + y1) // 2
        path = f"M{x0 + half_width},{y0 + HEIGHT} V{turn} H{x1 + half_width} V{y1 - 3}"
        if x0 == x1:
            text = (x1 + half_width + 26, y1 - 12)
    else:
        path = f"M{x0},{y0 + half_height} H{x1 + half_width} V{y1 + HEIGHT + 3}"
        text = ((x0 + x1 + half_width) // 2, y0 + half_height - 7)
    lines = [f'<path d="{path}" class="edge" marker-end="url(#tip)"/>']
    if text is not None:
        lines.append(f'<text x="{text[0]}" y="{text[1]}" class="label">{label_of(after)}</text>')
    return "\n".join(lines)


def lifecycle_svg() -> str:
    size = (LEFT * 2 + 5 * STEP_X + WIDTH, TOP * 2 + STEP_Y + HEIGHT)
    boxes = []
    for stage in SeedStage:
        x, y = corner(stage)
        boxes.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="10" '
            f'fill="{tint(STAGE_COLOURS[stage.name], STRENGTH)}" class="box"/>\n'
            f'<text x="{x + WIDTH // 2}" y="{y + 22}" class="name">{stage.name}</text>\n'
            f'<text x="{x + WIDTH // 2}" y="{y + 39}" class="what">{MEANING[stage]}</text>'
        )
    edges = [arrow(before, after) for before, afters in TRANSITIONS.items() for after in afters]
    style = (
        ".name{font:700 13px sans-serif;text-anchor:middle;fill:#222}"
        ".what{font:11px sans-serif;text-anchor:middle;fill:#444}"
        ".label{font:600 10px sans-serif;text-anchor:middle;fill:#666}"
        ".edge{fill:none;stroke:#777;stroke-width:1.6}.box{stroke:#555;stroke-width:1.2}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'width="{size[0]}" height="{size[1]}" role="img" aria-label="The life of a seed">',
        f"<style>{style}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#777"/></marker></defs>',
        f'<rect width="{size[0]}" height="{size[1]}" fill="#fff" rx="12"/>',
        *sorted(edges),
        *boxes,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def lifecycle_page() -> str:
    lines = [
        "# The life of a seed",
        "",
        "*Generated from the transition table and the gates by `docs/generate.py`.*",
        "",
        "![The life of a seed](lifecycle.svg)",
        "",
        "| stage | a seed exists, and pays rent | may become |",
        "|---|---|---|",
    ]
    for stage in SeedStage:
        afters = ", ".join(sorted(after.name for after in TRANSITIONS[stage])) or "nothing else"
        lines.append(f"| {stage.name} | {'yes' if stage in OCCUPIED_STAGES else ''} | {afters} |")
    lines += [
        "",
        "## What a decision means",
        "",
        "| op | leads to | heads that matter |",
        "|---|---|---|",
    ]
    leads = {gate.op: gate.after.name for gate in GATES if gate.op is not None}
    for op in LifecycleOp:
        heads = [name for name, on in zip(HEADS.names, HEADS.relevance[op], strict=True) if on]
        lines.append(f"| {op.name} | {leads.get(op, 'nothing changes')} | {', '.join(heads)} |")
    lines += [
        "",
        "GERMINATE passes through GERMINATED to TRAINING in the same step; with the immediate",
        "blend on to HOLDING. Stages without an op of their own pass with time. A gate stands in",
        "front of every stage and says why it is closed: `SlottedModel.explain(op, slot)`.",
        "",
    ]
    return "\n".join(lines)


def blueprints_page() -> str:
    lines = [
        "# Blueprints",
        "",
        "*Generated from the registry by `docs/generate.py`.*",
        "",
        "Parameters that a seed adds, by slot. Every seed starts as exactly nothing.",
    ]
    for host_name in HOSTS:
        host = build_host(host_name)
        specs = host.slot_specs()
        catalogue = build_catalogue(specs, sum(p.numel() for p in host.parameters()))
        lines += ["", f"## Host `{host_name}`: {catalogue.host_params:,} parameters", ""]
        heads = [f"{spec.name} ({spec.channels} channels)" for spec in specs]
        lines += [f"| blueprint | {' | '.join(heads)} | what it is |"]
        lines += ["|---" * (len(specs) + 2) + "|"]
        for index, name in enumerate(catalogue.names):
            costs = " | ".join(f"{row[index]:,}" for row in catalogue.costs)
            summary = find_blueprint(name, specs[0].family).summary
            lines.append(f"| `{name}` | {costs} | {summary} |")
    lines += ["", "## For models of your own", ""]
    lines += [
        "More of what the model itself is made of; `esper.inspect` shows what they add, place"
    ]
    lines += ["by place. The hosts above are offered `block` only if it is named in `blueprints=`."]
    lines += ["", "| blueprint | activations | what it is |", "|---|---|---|"]
    for family in Family:
        for name in blueprint_names(family, wrapped=True)[len(blueprint_names(family)) :]:
            summary = find_blueprint(name, family).summary
            lines.append(f"| `{name}` | {family.value} | {summary} |")
    lines += ["", "## Removed", ""]
    lines += [
        "A run or a controller that names one of these blueprints is refused. Load it with the"
    ]
    lines += ["last version that reads it."]
    lines += ["", "| blueprint | removed in | last version that reads it |", "|---|---|---|"]
    for name, removal in REMOVED_BLUEPRINTS.items():
        last_version = f"{removal.last_release} (commit {removal.last_commit})"
        lines.append(f"| `{name}` | {removal.removed_in} | {last_version} |")
    return "\n".join([*lines, ""])


def observations_page() -> str:
    host = build_host("conv1d")
    size = sum(p.numel() for p in host.parameters())
    table = FeatureTable.of(build_catalogue(host.slot_specs(), size))
    slots = len(table.catalogue.slots)
    lines = [
        "# Observations",
        "",
        "*Generated from the feature table by `docs/generate.py`.*",
        "",
        "What a learned controller sees of an environment: global features, then a block of the",
        "same layout for every slot. Every number is free of the task's scale and stays in its",
        "range. What is not measured is 0; the presence flag in the last column says so.",
        "`FeatureTable.describe(observation)` gives an observation by name, `split` the global",
        "part and the slots' blocks.",
        "",
        f"On host `conv1d` there are {table.size} features: {table.globals} global ones and",
        f"{table.per_slot} for each of {slots} slots, whose names begin with the slot's, as in",
        "`early:alpha`.",
    ]
    head = ["", "| feature | range | in units of | what | present if |", "|---|---|---|---|---|"]
    known = {feature.name for feature in (*GLOBAL_FEATURES, *table.slot_features)}
    more = [f for f in WHOLE_TOKEN.features if f.name not in known]
    told = (
        "A network over [tokens](controllers.md#networks-over-tokens) sees the global features "
        "and those below in one token, in one for each slot those of a slot but for its blueprint, "
        "and one token for each candidate, a slot and a blueprint together. All have a flag "
        "`advised` where the rule would do it."
    )
    for title, features in (
        ("Global", GLOBAL_FEATURES),
        ("Each slot", table.slot_features),
        ("Tokens: more of all", more),
        ("Tokens: each candidate", CANDIDATE_TOKEN.features),
    ):
        lines += ["", f"## {title}", *(["", told] if features is more else []), *head]
        for feature in features:
            name = f"`{feature.name}`"
            if feature.options:
                name = f"`{feature.name}.X`, X of {', '.join(feature.options)}"
            flags = ", ".join(f"`{flag}`" for flag in feature.flags)
            span = f"{feature.low:g} to {feature.high:g}"
            lines.append(f"| {name} | {span} | {feature.scale} | {feature.what} | {flags} |")
    return "\n".join([*lines, ""])


def atlas_page() -> str:
    parts = [
        "# The atlas",
        "*Generated from the shipped atlases by `docs/generate.py`; `esper atlas --show` prints the"
        " same.*",
        "What every single seed gains in every context of the built-in suites: planted at epoch "
        + ", ".join(map(str, ATLAS_EPOCHS[:-1]))
        + f" or {ATLAS_EPOCHS[-1]} of {DEFAULT_EPISODE_LENGTH}, advanced and fossilized as soon as "
        "the gates open, with each of the three blends. Gains are points of test accuracy of the "
        "committed network over the paired control, mean of the last epochs, after a rent of "
        f"{DEFAULT_RENT:g} points for 100 % of the host's parameters over a whole episode; ± is a "
        "standard error. Best and worst arms are chosen by validation data. *Waiting* is best "
        f"where no arm that was chosen on other seeds gains {WAIT_MARGIN:g} points. Where "
        "*schedules* are given, arms in other slots were added to the best one as long as another "
        "seed paid on validation data: those of the contexts are the oracle's, and one for all "
        "contexts is the best constant schedule.",
    ]
    for name in SUITES:
        atlas = shipped_atlas(find_suite(name))
        assert atlas is not None, f"{name} has no atlas"
        parts += [f"## `{name}`", _atlas_summary(atlas), _atlas_table(atlas)]
    return "\n\n".join(parts) + "\n"


def _atlas_summary(atlas: Atlas) -> str:
    rows = [
        f"{len(atlas.contexts)} contexts, {len(atlas.arms)} arms, {atlas.gain.shape[2]} random "
        "seeds of each. Suite scores (net gain / max(best arm's net gain, 3 points), mean over "
        "contexts), chosen on half of the seeds and scored on the others:",
        "",
        "| rent | oracle | best constant | random | waiting is best in |",
        "|---|---|---|---|---|",
    ]
    for rent in (0.0, 2.0, 5.0):
        found = atlas.summary(rent)
        rows.append(
            f"| {rent:g} | {found['oracle']:.2f} | {found['best_constant']:.2f} "
            f"({found['best_constant_share']:.0%} of the oracle) | {found['random']:.2f} "
            f"({found['random_share']:.0%}) | {found['wait_optimal_share']:.0%} of contexts |"
        )
    rows += ["", f"Best constant at rent {DEFAULT_RENT:g}: `{atlas.best_constant()}`."]
    if atlas.plans is not None:
        rows += [
            "",
            f"Best constant schedule: {_schedule(atlas.constant())} "
            f"({atlas.plans.episodes:,} more episodes for it and the oracle's schedules).",
        ]
    return "\n".join(rows)


def _schedule(schedule: Schedule) -> str:
    return ", ".join(f"`{arm}`" for arm in schedule) or "wait"


def _atlas_table(atlas: Atlas) -> str:
    net, judged = atlas.net(), atlas.judged().mean(2)
    mean, error = net.mean(2), net.std(2) / net.shape[2] ** 0.5
    heads = ["context", "never grown", "best arm", "gain", "worst arm", "gain"]
    heads += [] if atlas.plans is None else ["schedule"]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for place, context in enumerate(atlas.contexts):
        best, worst = int(judged[place].argmax()), int(judged[place].argmin())
        cells = [context.name, f"{float(atlas.control[place].mean()):.1f} %"]
        for arm in (best, worst):
            gain = f"{float(mean[place, arm]):+.1f} ± {float(error[place, arm]):.1f}"
            cells += [f"`{atlas.arms[arm]}`", gain]
        if atlas.plans is not None:
            cells.append(_schedule(atlas.schedules()[place]))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


WHY_REFUSED = {  # by what the sentence says
    "does not call it": "not called",
    "does not reach the model's output": "nothing comes back to it",
    "without gradients": "runs without gradients",
    "has a gradient": "nothing returned has a gradient",
    "holds no tensor": "no tensor",
    "say which tensor": "several tensors",
    "a slot cannot serve": "no tensor",
    "floating-point": "no real numbers",
    "empty tensor": "empty on the sample",
    "activations of": "too few or too many axes",
    "without a batch axis": "no batch axis",
    "something for every sample": "not something for every sample",
    "holds the channels": "channels uncertain",
    "returns images": "images or heads uncertain",
    "is the batch": "batch uncertain",
    "called with different": "called with different shapes",
}


def places_page(inspect: Callable[[Any], Any]) -> str:
    """What `inspect` says of every model of the zoo."""
    sys.path.insert(0, str(HERE.parent))
    from tests.kasmina.zoo_of_people import PEOPLE

    lines = [
        "# Places that are found in models",
        "",
        "*Generated by `docs/generate.py places.md` from models that the tests go through, each "
        "as people write it and only narrower.*",
        "",
        'What `slots="auto"` takes when no place is named, and which submodules cannot carry a '
        "slot. Every model that is taken is tested to the bit: planting changes no output, an "
        "isolated seed leaves the model's training alone, and the export gives what the grown "
        "network gives. `print(esper.inspect(model, sample))` shows the same of a model of your "
        "own, with the reason of every refusal in full.",
        "",
        '| model | parameters | places | `slots="auto"` takes | refused, and why |',
        "|---|---|---|---|---|",
    ]
    for model in PEOPLE:
        found = inspect(model)
        reasons = Counter(_why_refused(refusal.reason) for refusal in found.refusals)
        refused = "; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        taken = ", ".join(f"`{path}`" for path in found.chosen) or f"nothing: {model.reason}"
        cells = [model.name, f"{found.host_params:,}", str(len(found.places)), taken, refused]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _why_refused(sentence: str) -> str:
    return next(short for part, short in WHY_REFUSED.items() if part in sentence)


def reliability_page() -> str:
    """What the matrix of faults and the hour of work came to when all of it was last run."""
    found = json.loads((HERE / "reliability.json").read_text(encoding="utf-8"))
    faults = [name for name in next(iter(found["operations"].values())) if name != "places"]
    rows = [
        [name, counts["places"], *(counts[fault] for fault in faults)]
        for name, counts in found["operations"].items()
    ]
    text = (HERE / "reliability.txt").read_text(encoding="utf-8")
    tried = f"All {found['cells']:,} cells were tried, {found['failures']:,} of them failed."
    text = text.replace("@TRIED@", tried).replace("@SOAK@", _soak_table())
    return text.replace("@TABLE@", _table(["operation", "places", *faults], rows))


def _soak_table() -> str:
    """Counts of the hour, seven of each work; the slope is that of the quarters' highest counts,
    since a system takes back pages that nobody uses."""
    found = json.loads((HERE / "soak.json").read_text(encoding="utf-8"))
    head = ["", "minutes", "times", "memory, MiB", "open files", "files", "disk, MiB", "temporary"]
    rows, slopes = [], []
    for name in ("train", "grow"):
        counts = found[name]
        for row in (counts[place * (len(counts) - 1) // 6] for place in range(7)):
            minutes, times, memory, handles, files, disk, temporary = row
            cells = [f"{minutes:.0f}", times, f"{memory:.0f}", handles, files, f"{disk:.1f}"]
            rows.append([name, *cells, temporary])
        quarter = len(counts) / 4
        parts = [counts[round(quarter * n) : round(quarter * (n + 1))] for n in range(4)]
        most = [max(row[2] for row in part) for part in parts]
        slope = linear_regression([part[-1][0] / 60 for part in parts], most).slope
        said = " ".join(f"{each:.0f}" for each in most)
        slopes.append(f"{said} MiB in `{name}`, a slope of {slope:+.1f} MiB an hour")
    return f"{_table(head, rows)}\n\nMost memory in each quarter of the time: {'; '.join(slopes)}."


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


PAGES = {
    "reliability.md": reliability_page,
    "lifecycle.svg": lifecycle_svg,
    "lifecycle.md": lifecycle_page,
    "blueprints.md": blueprints_page,
    "observations.md": observations_page,
    "atlas.md": atlas_page,
}


def main() -> None:
    """All pages; but what takes a while only if it is named."""
    if PLACES in sys.argv:
        text = places_page(lambda model: esper.inspect(model.model(), model.sample))
        (HERE / PLACES).write_text(text, encoding="utf-8")
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
