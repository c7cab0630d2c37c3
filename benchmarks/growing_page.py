"""The page of `growing.py`: what was registered, and what came out, from the kept trainings."""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

import numpy as np
from _report import ROOT
from growing_figures import HARM, OTHERS, RIVALS, Ranking, TaskResults, figures, for_report, vs
from growing_jobs import PLANTED, Outcome, Study
from growing_replay import LEAST_EPOCHS, SAMPLERS, optuna_here
from growing_tasks import BUDGET, OWN_RATES, RATES, SEEDS, TASKS, TUNING_SEEDS, Task
from matplotlib.figure import Figure

from esper.garden.statistics import Estimate
from esper.show.palette import BLUE, GREEN, GREY, ORANGE, VERMILION
from esper.show.theme import LIGHT, Theme, new_figure, render

BARS = {"share_of_best_place": 0.75, "harm_rate": 0.10, "cost_factor": 2.0}
TEMPLATE = Path(__file__).with_name("growing_page.md")
RANKED = (
    "Candidates ranked by what can be known of them early, against what they gain on test data "
    "when they are planted, kept and trained to the end (mean over seeds): Spearman's correlation "
    "· gain of the first in the ranking as a share of the best gain · gain of the best of its "
    "first three. Shadows: gain of validation loss over its standard error after so many epochs. "
    "Gradient: of a shadow relative to the host's, in its first epoch."
)
COMMAND = "python benchmarks/growing.py --set {} --runs DIR --report --json docs/{}.json --write"
FIRST_JSON = ROOT / "docs" / "growing-first.json"
OWN_PAGES = {1: "growing-first", 3: "growing-third"}  # the second set's is that of them all
TITLES = {1: """# The first set of tasks

What the default of `esper.grow` came to, as it was then, on the tasks that were registered first.
It fell short, and since then these results are known to who changes it: what it is worth today is
measured on [a second set](growing-results.md). That page also says what the words here mean, what
the tasks are, and how all was measured.
""", 3: """# The third set of tasks

What the default of `esper.grow` came to on a third set of tasks. They were registered while the
rule was still tuned on the earlier tasks; since then only the rule changed, never a task. Bare
hosts had been trained once before, and nothing had grown on them.

12 of the 14 hosts lack by construction something that the catalogue brings (all but `beam` and
`tides_conv`), so `harm_rate` rests mostly on tasks where growing helps. Tasks that learn the same
data (a host and its larger twin) count as one, by their mean, in `share_of_best_place` and `vs_…`.

[The page of the second set](growing-results.md) says what the words here mean, what the tasks are,
and how all was measured.
"""}  # fmt: skip
FAILED = 0.5  # of the best seed's score: less than that, and a training has failed
TICKS = (-20, -10, -5, -2, 0, 2, 5, 10, 20, 40)
LINEAR = 5.0  # points on both sides of 0 that a picture shows undistorted


def page(study: Study, results: Sequence[TaskResults]) -> str:
    """What is registered, and what came out of the second set as far as it is trained."""
    command = COMMAND.format(2, "growing")
    outcome = "\n".join([*sections(results, "growing.png"), made(command, results)])
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        budget=BUDGET,
        seeds=", ".join(map(str, SEEDS["report 1"])),
        second_seeds=", ".join(map(str, SEEDS["report 2"])),
        third_seeds=", ".join(map(str, SEEDS["report 3"])),
        seed_count=len(SEEDS["report 2"]),
        tuning_seeds=", ".join(map(str, TUNING_SEEDS)),
        rates=", ".join(f"{rate:g}" for rate in RATES),
        rate_count=len(RATES),
        own_rates=", ".join(f"{own:.3g}" for own in OWN_RATES),
        planted=PLANTED,
        harm=f"{HARM:g}",
        least_epochs=LEAST_EPOCHS,
        samplers=SAMPLERS,
        registered=registered(study, {each.task.name for each in results}),
        outcome=outcome,
        first=_first_set(json.loads(FIRST_JSON.read_text(encoding="utf-8"))),
    )


def own_page(number: int, results: Sequence[TaskResults]) -> str:
    """What came out of the first or the third set."""
    name = OWN_PAGES[number]
    command = COMMAND.format(number, name)
    return "\n".join([TITLES[number], *sections(results, f"{name}.png"), made(command, results)])


def sections(results: Sequence[TaskResults], picture: str) -> list[str]:
    tables = (by_task, cautions, ways, ceilings, rankings)
    return [summary(results, picture), *filter(None, (table(results) for table in tables))]


def made(command: str, results: Sequence[TaskResults]) -> str:
    return f"`{command}` makes this page of the trainings in DIR, {_machines(results)}\n"


def _first_set(found: Mapping[str, float]) -> str:
    """In a table, what the first set's figures are."""
    return _table(("figure", "value", "bar"), [_bar_row(found, name) for name in BARS])


# --- tables --------------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def registered(study: Study, trained: Collection[str]) -> str:
    """What every task is; of the newer sets also whether anything has grown on it."""
    return _table(
        ("task", "for", "host", "parameters", "candidates", "train, validation, test",
         "epochs, batch", "scored by"),
        [_registered_row(study, task, trained) for task in TASKS.values()],
    )  # fmt: skip


def _registered_row(study: Study, task: Task, trained: Collection[str]) -> list[str]:
    size = sum(parameter.numel() for parameter in task.build(1.0).parameters())
    unseen = task.group == "report 2" and task.name not in trained
    return [
        f"`{task.name}`",
        task.group + (", never grown" if unseen else ""),
        task.title,
        f"{size:,}",
        str(len(study.candidates(task.name))),
        ", ".join(f"{count:,}" for count in task.samples.values()),
        f"{task.epochs}, {task.batch_size}",
        "accuracy" if task.guess is None else "loss",
    ]


def summary(results: Sequence[TaskResults], picture: str) -> str:
    """The figures that put tasks together."""
    found = figures(results)
    rows = [_bar_row(found, name) for name in BARS if name in found]
    reported = for_report(results)
    for rival, words in RIVALS.items():
        lead = vs(reported, rival)
        if lead is not None:
            rows.append([f"default less {words}, points (`vs_{rival}`)", f"{lead:+.2f}", ""])
    better, worse = (int(found.get(f"tasks_clearly_{how}", 0)) for how in ("better", "worse"))
    lines = [
        f"## What came out\n\nOn {len(reported)} tasks for the report the default is clearly "
        f"better than never on {better} and clearly worse on {worse}.\n",
        _table(("figure", "value", "bar"), rows),
        f"![What every way gains over never]({picture})\n",
    ]
    if optuna_here() is None:
        lines.insert(1, "Optuna is not installed here, so it was not compared with.\n")
    return "\n".join(lines)


def _bar_row(found: Mapping[str, float], name: str) -> list[str]:
    value, bar = found[name], BARS[name]
    sign, good = ("≥", value >= bar) if name == "share_of_best_place" else ("<", value <= bar)
    words = f"{value:.2f}"
    if f"{name}_lo" in found:
        words = f"{Estimate(value, found[f'{name}_lo'], found[f'{name}_hi']):.2f}"
    return [f"`{name}`", words, f"{sign} {bar:g}: {'reached' if good else 'not reached'}"]


def by_task(results: Sequence[TaskResults]) -> str:
    rows = []
    for each in results:
        share = each.share
        rows.append(
            [
                f"`{each.task.name}`"
                + (" (development)" if each.task.group == "development" else ""),
                f"{each.scores['never'].mean():.2f}",
                f"{each.difference('default'):+.2f}",
                f"{each.difference('ceiling'):+.2f}",
                "—" if share is None else f"{share:.2f}",
                f"{sum(each.harmed)}/{len(each.harmed)}",
                f"{each.cost_factor:.2f}",
                _kinds([run["grown"] for run in each.runs["default"]]),
            ]
        )
    header = ("task", "never", "default − never", "best single place − never", "share", "harmed",
              "cost", "what grew by default")  # fmt: skip
    return "## By task\n\n" + _table(header, rows)


def cautions(results: Sequence[TaskResults]) -> str:
    """Tasks whose difference says more of trainings that failed than of what was planted."""
    words = [caution for each in results if (caution := _caution(each)) is not None]
    return "## With caution\n\n" + "\n".join(words) if words else ""


def _caution(each: TaskResults) -> str | None:
    """None: no training failed."""
    scores = {way: each.scores[way] for way in ("never", "default")}
    never, default = (found < FAILED * scores["never"].max() for found in scores.values())
    if not (never | default).any():
        return None
    rate, slower = each.runs["never"][0]["rate"], each.own_rates["default_tuned"][0]
    tuned = each.study.all_found(each.study.tuning(each.task.name)[RATES.index(rate)]) or []
    return (
        f"`{each.task.name}`: at the rate of {rate:g}, which was the best on the seeds for tuning "
        f"(validation scores {_listed(tuned, 'validation')}), some trainings fail on the seeds "
        f"that are reported. The bare host itself fails on {never.sum()} of {never.size} (test "
        f"scores {_listed(each.runs['never'])}). The default fails on {default.sum()} "
        f"({_listed(each.runs['default'])}), among them {(default & ~never).sum()} where the bare "
        "host learned: it broke down after something was planted. At a rate of "
        f"{slower[0]['rate']:.3g} the default has {_listed(slower)}. So the difference of this "
        "task, its interval, and its part in all means over tasks tell of a rate at the edge more "
        "than of the places that were chosen; where only the default broke down, it counts as harm "
        "all the same.\n"
    )


def _listed(runs: Sequence[Outcome], name: str = "test") -> str:
    return ", ".join(f"{run[name]:.1f}" for run in runs)


def ways(results: Sequence[TaskResults]) -> str:
    """Test scores of all ways."""
    names = OTHERS | RIVALS
    known = [way for way in names if any(way in each.scores for each in results)]
    rows = [
        [f"`{each.task.name}`"]
        + [f"{each.scores[way].mean():.2f}" if way in each.scores else "" for way in known]
        for each in results
    ]
    header = ["task", *(names[way] for way in known)]
    return "## Test scores of all ways\n\nMeans over seeds, in points.\n\n" + _table(header, rows)


def ceilings(results: Sequence[TaskResults]) -> str:
    """The best single places, and the rates."""
    rows = []
    for each in results:
        best = each.candidates[each.best]
        rates = {"never": each.runs["never"], **each.tuned}
        words = [f"{runs[0]['rate']:.3g}" for runs in rates.values()]
        rows.append([f"`{each.task.name}`", f"{best} ({best.params:,})", *words])
    header = ("task", "best single place (parameters)", "rate of never", "of default, tuned",
              "of wider", "of scratch")  # fmt: skip
    return "## Places and rates\n\n" + _table(header, rows)


def rankings(results: Sequence[TaskResults]) -> str:
    """How well what is known early ranks candidates."""
    kinds = list(dict.fromkeys(kind for each in results for kind in each.rankings()))
    rows = []
    for each in results:
        found = each.rankings()
        cells = [_ranked(found[kind]) if kind in found else "" for kind in kinds]
        rows.append([f"`{each.task.name}`", *cells])
    table = _table(("task", *kinds), rows)
    return f"## What is known early\n\n{RANKED}\n\n{table}{_audits(figures(results))}"


def _audits(found: Mapping[str, float]) -> str:
    """How often `esper.audit` was right before anything grew."""
    words = {"missing": "something is missing", "nothing_to_gain": "nothing is to gain"}
    told = [
        f"that {what} in {found[f'audits_{name}']:.0f} of its audits, and was right in "
        f"{found[f'audits_{name}_right']:.0%} of them"
        for name, what in words.items()
        if f"audits_{name}_right" in found
    ]
    if not told:
        return ""
    right = "right: one seed at the best of all places clearly gains something, or does not"
    return f"\n`esper.audit` said {'; '.join(told)} ({right}).\n"


def _ranked(rankings: Sequence[Ranking]) -> str:
    """Means over seeds."""
    columns = np.mean([(each.spearman, each.top1, each.top3) for each in rankings], axis=0)
    agreement, *shares = columns.tolist()
    return " · ".join(
        [f"{agreement:+.2f}"] + ["—" if math.isnan(x) else f"{x:.2f}" for x in shares]
    )


def _kinds(grown: Sequence[Sequence[str]]) -> str:
    """What grew in how many of the runs."""
    counts = Counter(name for names in grown for name in names)
    words = [f"{name} ({count}/{len(grown)})" for name, count in counts.most_common(4)]
    more = len(counts) - len(words)
    return ", ".join(words + ([f"{more} more"] if more > 0 else [])) or "—"


def _machines(results: Sequence[TaskResults]) -> str:
    found = Counter(run["machine"] for each in results for runs in each.table for run in runs)
    words = [f"{machine} ({count:,} candidates)" for machine, count in found.most_common()]
    return "trained on " + "; ".join(words) + "."


# --- picture -------------------------------------------------------------------------------------


def draw_gains(results: Sequence[TaskResults]) -> bytes:
    """As PNG: what every candidate and every way gains over never, task by task."""
    return render(lambda theme: _gains(results, theme), LIGHT)


def _gains(results: Sequence[TaskResults], theme: Theme) -> Figure:
    figure = new_figure(1.2 + 0.42 * len(results))
    axes = figure.add_subplot()
    marks = {
        "default": ("default", GREEN, "D"), "ceiling": ("best single place", BLUE, "*"),
        "race": ("race", ORANGE, "^"), "wider": ("wider host, tuned", VERMILION, "s"),
    }  # fmt: skip
    for row, each in enumerate(reversed(results)):
        never = each.scores["never"].mean()
        gains = each.tests.mean(1) - never
        label = "a candidate, kept to the end" if row == 0 else None
        axes.scatter(gains, np.full(len(gains), row), s=9, color=GREY, alpha=0.5, label=label)
        for number, (way, (words, colour, marker)) in enumerate(marks.items()):
            gain, place = each.difference(way), row + 0.12 * (1.5 - number)
            size = 9 if marker == "*" else 5
            axes.errorbar(
                gain.value, place, xerr=[[gain.value - gain.low], [gain.high - gain.value]],
                color=colour, marker=marker, markersize=size, linewidth=1,
                label=words if row == 0 else None,
            )  # fmt: skip
    axes.axvline(0.0, color=theme.faint, linewidth=1)
    axes.set_xscale("symlog", linthresh=LINEAR)
    shown = axes.get_xlim()  # ticks beyond it would widen it
    axes.set_xticks(TICKS, [f"{tick:+g}" if tick else "0" for tick in TICKS])
    axes.set_xlim(shown)
    axes.minorticks_off()
    axes.set_yticks(range(len(results)), [each.task.name for each in reversed(results)])
    axes.set_xlabel(f"points of test score over never (beyond ±{LINEAR:g} by powers)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return figure
