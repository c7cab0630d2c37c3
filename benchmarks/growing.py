"""Does growing pay? Accuracy or loss on test data against parameters, on three tasks.

    python benchmarks/growing.py [--seeds 5] [--runs DIR] [--json FILE] [--write]
    python benchmarks/growing.py --quick --tasks mnist1d      # to see that it works

Four ways to train a host that is too small, with the same data, batches and epochs:

- never: as it is;
- default: `esper.grow` within +15 %, with nothing else said (`slots="auto"`, "heuristic");
- grown: `esper.grow` within +15 %, with the slots and settings of `growing_tasks.py`;
- scratch: what "grown" became, with fresh weights and from the first epoch on, at the one of
  three learning rates that is best on validation data.

All through the public API. With --runs every seed is kept in a file, and those that are already
there are not trained again. The overhead of an idle host is measured as in `wrapping.py`.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from _report import PAGE, write_json, write_section
from growing_tasks import TASKS, Data, Task
from torch import nn
from wrapping import LIMIT, MODELS, measure

import esper
from esper.api import GrownRun
from esper.garden.statistics import Estimate, mean, mean_interval
from esper.leyline.errors import EsperError
from esper.leyline.streams import derive_seed
from studies.comparisons import paired_difference

BUDGET = "+15%"
WAYS = ("never", "default", "grown", "scratch")
RESULTS = PAGE.parent / "growing-results.md"
PICTURE = PAGE.parent / "growing.png"
HEADER = ("task", "way", "parameters", "test", "difference to never", "what grew")
IDLE = ("model", "plain step, µs", "idle host, µs", f"overhead (aim: ≤ {LIMIT:.0%})", "noise")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One trained network."""

    params: float
    test: float  # percent right, or nats for a byte
    validation: float  # the score that decides, in percent
    rate: float  # learning rate
    grown: list[str]
    seconds: float  # of the processor


# --- training ------------------------------------------------------------------------------------


def train(
    task: Task, data: Data, model: nn.Module, seed: int, rate: float, **choices: object
) -> tuple[GrownRun, Outcome]:
    """One run of `esper.grow`; nothing else trains here, so that all ways train alike."""
    began = time.process_time()
    run = esper.grow(
        model,
        data["train"],
        data["validation"],
        test=data["test"],
        loss="cross_entropy",
        epochs=task.epochs,
        lr=rate,
        scheduler=lambda made: torch.optim.lr_scheduler.CosineAnnealingLR(made, task.epochs),
        batch_size=task.batch_size,
        seed=seed,
        **choices,  # type: ignore[arg-type]
    )
    report = run.report()
    if not report.within_budget:
        raise SystemExit(f"{task.name}, seed {seed}: over the budget\n{report}")
    return run, Outcome(
        params=report.host_params + report.added,
        test=report.after["test_loss" if task.by_loss else "test_score"],
        validation=report.after["score"],
        rate=rate,
        grown=[f"{seed.blueprint} at {seed.slot}" for seed in report.grown],
        seconds=time.process_time() - began,
    )


def newborn(task: Task, seed: int) -> nn.Module:
    """The host with the weights of this seed."""
    torch.manual_seed(derive_seed(seed, "newborn"))
    return task.build()


def compare(task: Task, seed: int) -> dict[str, Outcome]:
    """All ways, on one seed."""
    data = task.data(seed)

    def trained(**choices: object) -> tuple[GrownRun, Outcome]:
        return train(task, data, newborn(task, seed), seed, task.rate, budget=BUDGET, **choices)

    _, never = trained(controller="never")
    _, default = trained()
    run, grown = trained(slots=list(task.slots), controller=task.controller)
    tried = []
    for rate in task.rates:
        plain = run.export()
        start_anew(plain, newborn(task, seed))
        _, outcome = train(task, data, plain, seed, rate, budget=None, controller="never")
        tried.append(outcome)
    best = max(tried, key=lambda outcome: outcome.validation)
    seconds = sum(outcome.seconds for outcome in tried)
    scratch = dataclasses.replace(best, grown=grown.grown, seconds=seconds)
    return dict(zip(WAYS, (never, default, grown, scratch), strict=True))


def start_anew(plain: nn.Module, host: nn.Module) -> None:
    """Give an exported network the weights of a newborn host, and its seeds those of new layers.

    Layers in a seed start as torch starts them, also the last one, which a planted seed has at
    zero; norms and scalar gates start at one.
    """
    missing, unknown = plain.load_state_dict(host.state_dict(), strict=False)
    assert not unknown, f"an export renamed {unknown}"
    left = set(missing)
    for path, module in plain.named_modules():
        names = {f"{path}.{name}" for name in dict(module.named_parameters(recurse=False))}
        if names and names <= left:
            _start_layer(module)
            left -= names
    assert not left, f"still trained: {left}"


def _start_layer(layer: nn.Module) -> None:
    """Also of one that is a plain graph and so does not know how it starts."""
    reset = getattr(layer, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    own = dict(layer.named_parameters(recurse=False))
    is_linear = own["weight"].dim() == 2
    for name, parameter in own.items():
        if is_linear:
            bound = 1.0 / math.sqrt(own["weight"].shape[1])
            nn.init.uniform_(parameter, -bound, bound)
        else:
            nn.init.constant_(parameter, 1.0 if name == "weight" else 0.0)


def outcomes(task: Task, seed: int, folder: Path | None) -> dict[str, Outcome]:
    """Trained now, or as they were kept."""
    path = None if folder is None else folder / f"{task.name}-{seed}.json"
    if path is not None and path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {way: Outcome(**kept[way]) for way in WAYS}
    made = compare(task, seed)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {way: dataclasses.asdict(outcome) for way, outcome in made.items()}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return made


# --- figures -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """One way on one task, over the seeds."""

    task: Task
    way: str
    params: float
    test: Estimate
    difference: Estimate | None  # to never, on the same seeds
    each: Sequence[Outcome]

    def row(self) -> list[str]:
        digits = 3 if self.task.by_loss else 1
        unit = "nats" if self.task.by_loss else "%"
        gap = self.difference
        return [
            self.task.title,
            self.way,
            f"{self.params:,.0f}",
            f"{spoken(self.test, digits)} {unit}",
            "" if gap is None else spoken(gap, digits, sign="+"),
            "" if self.way == "scratch" else kinds(self.each),
        ]

    def figures(self) -> dict[str, float]:
        name = f"growing_{self.task.name}_{self.way}"
        found = {f"{name}_params": self.params, f"{name}_test": self.test.value}
        found |= {f"{name}_test_lo": self.test.low, f"{name}_test_hi": self.test.high}
        found[f"{name}_seconds"] = sum(outcome.seconds for outcome in self.each)
        if self.difference is not None:
            found[f"{name}_difference"] = self.difference.value
            found[f"{name}_difference_lo"] = self.difference.low
            found[f"{name}_difference_hi"] = self.difference.high
        return found


def spoken(found: Estimate, digits: int, sign: str = "") -> str:
    return f"{found:{sign}.{digits}f}"


def kinds(each: Sequence[Outcome]) -> str:
    """What grew in how many of the runs."""
    all_of_them = [grown for outcome in each for grown in outcome.grown]
    counts = {grown: all_of_them.count(grown) for grown in sorted(set(all_of_them))}
    return ", ".join(f"{grown} ({count}/{len(each)})" for grown, count in counts.items()) or "—"


def lines_of(task: Task, found: Sequence[Mapping[str, Outcome]]) -> list[Line]:
    # Seeds are the episodes of one context: every way has met the same ones.
    tests = {way: [[seed[way].test for seed in found]] for way in WAYS}
    return [
        Line(
            task=task,
            way=way,
            params=sum(seed[way].params for seed in found) / len(found),
            test=mean_interval(tests[way]),
            difference=None
            if way == "never"
            else paired_difference(tests[way], tests["never"], statistic=mean),
            each=[seed[way] for seed in found],
        )
        for way in WAYS
    ]


def draw(lines: Sequence[Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(line.task.name for line in lines))
    size = (4.2 * len(tasks), 3.9)
    figure, places = pyplot.subplots(1, len(tasks), figsize=size, squeeze=False)
    for axes, name in zip(places[0], tasks, strict=True):
        mine = [line for line in lines if line.task.name == name]
        for line, colour in zip(mine, ("black", "tab:gray", "tab:green", "tab:blue"), strict=True):
            each = [(outcome.params, outcome.test) for outcome in line.each]
            axes.scatter(*zip(*each, strict=True), color=colour, alpha=0.3, s=14, linewidths=0)
            below, above = line.test.value - line.test.low, line.test.high - line.test.value
            axes.errorbar(
                line.params, line.test.value, [[below], [above]],
                color=colour, marker="o", capsize=4, label=line.way,
            )  # fmt: skip
        host = mine[0].params
        axes.axvline(1.15 * host, color="tab:red", linewidth=1, linestyle=":")
        axes.annotate(
            "+15 %", (1.15 * host, 0.0), (-3, 6), ("data", "axes fraction"), "offset points",
            color="tab:red", ha="right",
        )  # fmt: skip
        worth = "loss on test data, nats per byte" if mine[0].task.by_loss else "test accuracy, %"
        axes.set(xlabel="parameters", ylabel=worth, title=mine[0].task.title)
        if mine[0].task.by_loss:
            axes.invert_yaxis()  # up is better in every panel
        axes.set_xlim(0.98 * host, 1.17 * host)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = places[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(WAYS), frameon=False)
    figure.tight_layout(rect=(0.0, 0.07, 1.0, 1.0))
    figure.savefig(path, dpi=120)


# --- the command ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--quick", action="store_true", help="little data, one seed")
    parser.add_argument("--runs", type=Path, help="keep every seed here, and use what is there")
    parser.add_argument("--steps", type=int, default=1000, help="of the overhead; 0: leave it out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--write", action="store_true", help="put tables and picture into the docs")
    options = parser.parse_args()
    if options.write and (options.quick or set(options.tasks) != set(TASKS) or not options.steps):
        parser.error("--write is for the whole: without --quick, --tasks and --steps 0")
    torch.set_num_threads(1)
    try:
        lines = run_tasks(options)
    except EsperError as error:  # such as a data set that is not there, with how to get it
        raise SystemExit(str(error)) from error
    figures = {name: value for line in lines for name, value in line.figures().items()}
    steps = options.steps // 10 if options.quick else options.steps
    costs = [measure(name, steps, torch.device("cpu")) for name in MODELS] if steps else []
    for cost in costs:
        print(f"idle {cost['model']}: {cost['overhead']:+.2%}, noise {cost['noise']:.2%}")
        figures[f"growing_idle_{cost['model']}_overhead"] = float(cost["overhead"])
        figures[f"growing_idle_{cost['model']}_noise"] = float(cost["noise"])
    write_json(options.json, figures)
    if options.picture is not None:
        draw(lines, options.picture)
    if options.write:
        command = f"python benchmarks/growing.py --seeds {options.seeds} --write"
        sections = {
            "growing": (HEADER, [line.row() for line in lines]),
            "idle": (IDLE, [idle_row(cost) for cost in costs]),
        }
        for name, (header, rows) in sections.items():
            write_section(name, "cpu", command, header, rows, page=RESULTS)
        draw(lines, PICTURE)


def idle_row(cost: Mapping[str, float | str]) -> list[str]:
    times = [f"{cost[name]:.0f}" for name in ("plain", "wrapped")]
    return [f"{cost['model']}", *times, f"{cost['overhead']:+.1%}", f"{cost['noise']:.1%}"]


def run_tasks(options: argparse.Namespace) -> list[Line]:
    lines = []
    for name in options.tasks:
        task = TASKS[name].quick() if options.quick else TASKS[name]
        found = []
        for seed in range(1 if options.quick else options.seeds):
            found.append(outcomes(task, seed, options.runs))
            shown = [f"{way} {outcome.test:.4g}" for way, outcome in found[-1].items()]
            print(f"{name}, seed {seed}: {', '.join(shown)}", flush=True)
        made = lines_of(task, found)
        lines += made
        for line in made:
            print(" | ".join(line.row()), flush=True)
    return lines


if __name__ == "__main__":
    main()
