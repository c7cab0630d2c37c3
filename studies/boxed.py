"""The controller that comes with Esper: of what the trainings of the study are reported with, the
one that gained most on validation worlds, with a card that says what came of it."""

from pathlib import Path

from esper.garden.greenhouse import VALIDATION
from esper.tamiyo.controllers.learned import BUNDLED_FOLDER, Card, load_saved, save_controller
from studies.report.transfer_results import Figures, Results, figures_of
from studies.transfer_plan import SIZES, Study

LIMITS = (
    "For hosts with any slots and blueprints whose shadows can train, so not where a loop gives no "
    "loss; episodes of 12 to 60 epochs. It was fitted to what seeds gained in small dense and "
    "convolutional hosts of up to 8 slots that learn to classify; of other models it knows what "
    "shadows and the rule that advises it say."
)
LEADS = ("_vs_strongest_rule", "_vs_best_single_rule", "_vs_best_single_rule_elsewhere",
         "c2_garden_vs_specialist")  # fmt: skip
PUBLISHED = (*(f"{lead}{end}" for lead in LEADS for end in ("", "_lo", "_hi")), "_points",
             "_harmful_rate", "_flops_factor", "_flops_factor_audition")  # fmt: skip


def best_of(results: Results) -> str:
    """By validation worlds alone: what is held out chooses nothing."""
    return max(results.chosen, key=lambda name: results.chosen[name][name][0])


def card_of(results: Results, name: str) -> Card:
    points, harmed = results.chosen[name][name]
    figures: Figures = figures_of(results)
    return {
        "name": "tamiyo",
        "training": name,
        "suite": "greenhouse",
        "episodes": results.plan["gains"],
        VALIDATION: {"net_points": points, "harmful_rate": harmed},
        "evidence_of": list(results.learners),
        "evidence": {key: each for key, each in figures.items() if key.endswith(PUBLISHED)},
        "limits": LIMITS,
    }


def box(runs: Path, target: Path = BUNDLED_FOLDER / "tamiyo") -> str:
    """Put it there; its name."""
    results = Results.read(runs)
    name = best_of(results)
    kept = load_saved(Study(runs, SIZES["gpu"]).folder(name))
    save_controller(kept.network, target, None, card_of(results, name), rule=kept.rule)
    return name
