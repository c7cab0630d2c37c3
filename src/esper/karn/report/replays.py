"""The best episode played again, to ask how much of its accuracy each seed is worth.

Telemetry holds decisions and not networks, but an episode follows from its case and its decisions.
Imports torch, which the rest of a report does without.
"""

import math

import torch

from esper.garden.attribution import MAX_EXACT_SEEDS, shapley
from esper.garden.cases import Case
from esper.garden.episodes import Episodes
from esper.garden.suites import Suite
from esper.karn.report.run_facts import Facts, Story
from esper.leyline.errors import EsperError
from esper.leyline.legality import Actions

SAME_ACCURACY = 2.0  # points that a replay may be off by: another population rounds otherwise
ORDERS = 64  # that are sampled where there are too many seeds for every subset


def seed_worths(facts: Facts, story: Story) -> dict[str, float]:
    """By slot, points of validation accuracy: Shapley values of the seeds that are on at the end.

    Empty where there are none, and where the episode cannot be played as it was.
    """
    try:
        episodes = played_again(facts, story)
    except (EsperError, KeyError, StopIteration, ValueError):  # another suite, layout or version
        return {}
    population, last = episodes.population, float(story.accuracy[-1])
    if abs(float(episodes.ledger.current[0, story.steps - 1]) - last) > SAME_ACCURACY:
        return {}
    many = int((population.lifecycle.alpha[0] > 0).sum()) > MAX_EXACT_SEEDS
    (worths,) = shapley(population, samples=ORDERS if many else None).tolist()
    found = zip(population.catalogue.slots.names, worths, strict=True)
    return {slot: worth for slot, worth in found if not math.isnan(worth)}


def played_again(facts: Facts, story: Story) -> Episodes:
    """The episode's case, with its decisions one after the other."""
    suite, layout = Suite.from_dict(facts.about["suite"]), facts.layout
    assert layout is not None
    context = next(each for each in suite.training if each.name == story.episode["context"])
    episodes = Episodes([context], 1, horizon=story.steps)
    space = episodes.population.space
    if space.names != layout.heads:
        raise EsperError("Another action space", given=layout.heads, valid=space.names)
    episodes.begin(torch.tensor([0]), [Case(context, story.episode["seed"])])
    for decision in story.decisions:
        chosen = [
            names.index(decision.actions[head]) if head in decision.actions else 0
            for head, names in zip(layout.heads, layout.actions, strict=True)
        ]
        episodes.advance(Actions(space, torch.tensor([chosen])))
    return episodes
