"""The text that `print(run)` shows: parameters, scores, cost and every permanent addition.

A summary has at most `MAX_LINES` lines of at most `MAX_WIDTH` characters.
"""

import math
import re
import textwrap
from collections.abc import Sequence

from esper.show.growth_facts import Contribution, Report, SeedLife
from esper.show.terminal import listed, shortened

MAX_LINES = 12
MAX_WIDTH = 100
MODEL_WIDTH = 30  # characters of a model's name
BLUEPRINT_WIDTH = 20  # and of a blueprint's
MAX_SENTENCE_LINES = 3
SCORE_DECIMALS = 1  # of a score in percent, and of a contribution to it
SMALL_ERROR = 0.05  # standard error in points below which one decimal shows nothing
_GAP = "  "


def summary(report: Report) -> str:
    """Describe a run in a few lines.

    Additions stand in the order of their contributions, the largest first.
    """
    lines = [*_wrapped(_parameters_line(report)), *_wrapped(_scores_line(report))]
    if report.epochs:
        lines += [_cost_line(report)]
    if report.grown:
        lines += ["", *_additions(report, MAX_LINES - len(lines) - 1)]
    elif report.epochs:
        lines += ["", *_wrapped(_nothing_added(report))]
    return "\n".join(lines)


# --- lines above the table ---------------------------------------------------------------------


def _parameters_line(report: Report) -> str:
    before = report.host_params
    after = before + report.added
    model = shortened(report.model, MODEL_WIDTH)
    growth = f"{report.share:+.1f} %, {_budget(report)}"
    return f"{model}: {before:,} → {after:,} parameters ({growth}), {_epochs(report)}"


def _budget(report: Report) -> str:
    if report.room is None:
        return "no budget limit"
    percent = re.fullmatch(r"\+?([\d.]+)\s*%", str(report.settings.get("budget")).strip())
    if percent is not None:
        return f"budget +{percent[1]} %"
    return f"budget +{report.room:,}"


def _epochs(report: Report) -> str:
    unit = "epoch" if report.planned == 1 else "epochs"
    if len(report.epochs) == report.planned:
        return f"{report.planned} {unit}"
    return f"{len(report.epochs)} of {report.planned} {unit}"


def _scores_line(report: Report) -> str:
    """State the validation score and loss before and after training, and the test score."""
    before, after = report.before, report.latest
    if not before or not after:
        return "not trained yet"
    losses = f"{before['loss']:.3g} → {after['loss']:.3g}"
    scores = f"{_score(report, before['score'])} → {_score(report, after['score'])}"
    if report.metric == "loss":
        line = f"validation loss: {losses} (score {scores})"
        if "test_loss" in after:
            line += f"; test loss: {after['test_loss']:.3g}"
        return line
    line = f"validation {report.metric}: {scores} (loss {losses})"
    if "test_score" in after:
        line += f"; test {report.metric}: {_score(report, after['test_score'])}"
    return line


def _score(report: Report, score: float) -> str:
    unit = " %" if report.metric == "accuracy" else ""
    return f"{_number(score, SCORE_DECIMALS)}{unit}"


def _cost_line(report: Report) -> str:
    if report.relative_cost is None:
        return "cost: not known, because the FLOPs of this model could not be counted"
    count = len(report.epochs)
    epochs = f"{count} epoch" if count == 1 else f"{count} epochs"
    return f"cost: {report.relative_cost:.1f}× the FLOPs of plain training for {epochs}"


def _nothing_added(report: Report) -> str:
    """State in one sentence that nothing was added, and which trial came closest."""
    growing = sum(seed.there for seed in report.seeds)
    if growing:
        return f"Nothing is permanent yet; on probation: {growing}."
    beginning = "Nothing was added" if report.after else "Nothing was added yet"
    if report.trials:
        best = min(report.trials, key=lambda trial: trial.val_loss)
        if best.val_loss == math.inf:
            return f"{beginning}; {listed(best.seeds)} diverged in the trial."
        losses = f"validation loss {best.val_loss:.4g}, {best.val_loss_without:.4g} without"
        return f"{beginning}; {listed(best.seeds)} came closest ({losses})."
    if report.seeds:
        return f"{beginning}; seeds that were planted and removed again: {len(report.seeds)}."
    return f"{beginning}; no seed was planted."


def _wrapped(sentence: str) -> list[str]:
    return textwrap.wrap(
        sentence, MAX_WIDTH, max_lines=MAX_SENTENCE_LINES, placeholder=" …", subsequent_indent="  "
    )


# --- the table of additions --------------------------------------------------------------------


def _additions(report: Report, max_lines: int) -> list[str]:
    """List the additions in at most this many lines, the header included."""
    seeds = sorted(report.grown, key=lambda seed: _value(report, seed), reverse=True)
    shown = seeds
    if len(seeds) + 1 > max_lines:
        shown = seeds[: max_lines - 2]
    rest = seeds[len(shown) :]
    contribution_title = f"contribution ({_unit(report)})"
    rows = [("added", "after layer", "parameters", contribution_title)]
    for seed in shown:
        blueprint = shortened(seed.blueprint, BLUEPRINT_WIDTH)
        row = (blueprint, seed.slot, f"+{seed.params:,}", _contribution(report, seed))
        rows.append(row)
    lines = _table(rows)
    if rest:
        lines.append(f"{len(rest)} more: +{sum(seed.params for seed in rest):,} parameters")
    return lines


def _table(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Align the rows, and shorten the names of layers to what the other columns leave."""
    added_width, layer_width, size_width, last_width = (
        max(len(row[column]) for row in rows) for column in range(4)
    )
    layer_width = min(
        layer_width, MAX_WIDTH - added_width - size_width - last_width - 3 * len(_GAP)
    )
    lines = []
    for added, layer, size, last in rows:
        layer = shortened(layer, layer_width, keep_end=True)
        cells = added.ljust(added_width), layer.ljust(layer_width), size.rjust(size_width), last
        lines.append(_GAP.join(cells).rstrip())
    return lines


def _measured(report: Report, seed: SeedLife) -> Contribution | None:
    """Return a seed's contribution to the finished network, else the one measured last."""
    if seed.slot in report.contributions:
        return report.contributions[seed.slot]
    if seed.contribution is None:
        return None
    return Contribution(value=seed.contribution, standard_error=None)


def _value(report: Report, seed: SeedLife) -> float:
    measured = _measured(report, seed)
    return float("-inf") if measured is None else measured.value


def _is_in_units_of_loss(report: Report) -> bool:
    """Contributions during a run are points of the score that the loss is turned into."""
    return report.metric == "loss" and bool(report.contributions)


def _unit(report: Report) -> str:
    if _is_in_units_of_loss(report):
        return "validation loss added if removed"
    return f"{report.score_name} points lost if removed"


def _contribution(report: Report, seed: SeedLife) -> str:
    measured = _measured(report, seed)
    if measured is None:
        return "not measured"
    value, error = measured.value, measured.standard_error
    if _is_in_units_of_loss(report):
        value_text = f"{'−' if value < 0 else ''}{abs(value):.3g}"
        error_text = "" if error is None else f" ± {error:.2g}"
    else:
        is_small = error is not None and 0.0 < error < SMALL_ERROR
        decimals = SCORE_DECIMALS + 1 if is_small else SCORE_DECIMALS
        value_text = _number(value, decimals)
        error_text = "" if error is None else f" ± {error:.{decimals}f}"
    note = "" if measured.is_measurable else " (none measurable)"
    return f"{value_text}{error_text}{note}"


def _number(value: float, decimals: int) -> str:
    """Format a number with a minus sign as printed, and zero without a sign."""
    text = f"{value:.{decimals}f}"
    if float(text) == 0.0:
        return text.removeprefix("-")
    return text.replace("-", "−")
