"""The figures of studies, flat: one name, one number.

`_lo` and `_hi` are the ends of 95 % intervals. Without a suffix a figure is at the default rent;
others have it behind, as in `_rent_0`.
"""

import math

from esper.garden.statistics import Estimate
from esper.leyline.constants import DEFAULT_RENT, RENT_LEVELS
from studies.report.growth import GrowthStudy
from studies.report.learning import (
    APPRENTICE,
    BANDIT,
    BLANKED,
    CONSTANT,
    TAMIYO,
    TRAINING,
    UNTAUGHT,
    LearningStudy,
)
from studies.tuning import KINDS

Figures = dict[str, float]


def learning_figures(study: LearningStudy) -> Figures:
    """Everything that is said of the second claim."""
    figures: Figures = {
        "c2_trainings": len(study.trainings[TAMIYO]),
        "c2_episodes_per_context": study.episodes,
    }
    spent = study.description["episodes"]
    if (each := study.spent(TAMIYO)) is not None:
        figures["c2_episodes_per_training"] = each
    figures |= {f"c2_episodes_spent_{name}": float(count) for name, count in spent.items()}
    rivals = {
        "best_constant": CONSTANT,
        "best_heuristic": study.best_heuristic,
        "blanked": BLANKED,
        "bandit": BANDIT,
        "untaught": UNTAUGHT,
        "apprentice": APPRENTICE,
        **{name: name for name in (*KINDS, "random")},
    }
    for group in study.groups:
        prefix = "c2_" if group == TRAINING else f"c2_heldout_{group}_"
        for rent in RENT_LEVELS:
            after = "" if rent == DEFAULT_RENT else f"_rent_{rent:g}"
            for word, rival in rivals.items():
                _add(figures, f"{prefix}vs_{word}", study.lead(group, rival, rent), after)
                by_score = study.score_lead(group, rival, rent)
                _add(figures, f"{prefix}score_vs_{word}", by_score, after)
            _add(figures, f"{prefix}gap_closed", study.gap_closed(group, rent), after)
            harmful = study.harmful(TAMIYO, group, rent)
            _add(figures, f"{prefix}harmful_rate", harmful, after)
        for line in study.lines(group):
            _add(figures, f"{prefix}{line.controller}_score", line.score)
            _add(figures, f"{prefix}{line.controller}_gain", line.gain)
            figures[f"{prefix}{line.controller}_harmful"] = line.harmful.value
            figures[f"{prefix}{line.controller}_added"] = line.added
            figures[f"{prefix}{line.controller}_flops"] = line.flops
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def growth_figures(study: GrowthStudy) -> Figures:
    """Everything that is said of the first claim."""
    figures: Figures = {
        "c1_contexts": len(study.contexts),
        "c1_seeds": study.seeds,
    }
    for rival in study.rivals:
        for who, word in ((study.GROWN, "grown"), (study.TUNED, "tuned")):
            leads = {context: study.lead(who, rival, context) for context in study.contexts}
            above = sum(lead.low > 0 for lead in leads.values())
            below = sum(lead.high < 0 for lead in leads.values())
            figures[f"c1_{word}_above_{rival}"] = above
            figures[f"c1_{word}_below_{rival}"] = below
            for context, lead in leads.items():
                _add(figures, f"c1_{context}_{word}_vs_{rival}", lead)
    for context in study.contexts:
        for line in study.lines(context):
            _add(figures, f"c1_{context}_{line.name}", line.test)
            figures[f"c1_{context}_{line.name}_flops"] = line.flops
            figures[f"c1_{context}_{line.name}_parameters"] = line.parameters
    return {name.replace("/", "_"): value for name, value in figures.items()}


def _add(figures: Figures, name: str, estimate: Estimate | None, after: str = "") -> None:
    if estimate is not None:
        figures[f"{name}{after}"] = estimate.value
        figures[f"{name}_lo{after}"] = estimate.low
        figures[f"{name}_hi{after}"] = estimate.high
