"""Measure the contribution of every permanent seed to a finished network, with its standard error.

A contribution is the validation score of the network minus its score without the seed. Both are
measured on the same samples in the same order, so the standard error is that of paired differences.
"""

import math

import torch
from torch import Tensor

from esper.api import ranks
from esper.api.batches import Batches
from esper.api.growing_model import GrowingModel
from esper.api.scoring import Scoring
from esper.api.ticking import measuring, row
from esper.kasmina.isolation import randomness_kept
from esper.leyline.stages import SeedStage
from esper.show.growth_facts import Contribution


def measure_contributions(
    host: GrowingModel, scoring: Scoring, batches: Batches, stream: int
) -> dict[str, Contribution]:
    """Measure by how much the score falls without each permanent seed.

    Args:
        host: The network, from which every seed that is not permanent was removed.
        scoring: How the run scores models.
        batches: Validation data.
        stream: Seed of the random numbers with which the run scores models on these data.

    Returns:
        The contribution of every slot that holds a permanent seed.
    """
    permanent = [
        name for name, slot in host.seed_slots.items() if slot.stage is SeedStage.FOSSILIZED
    ]
    if not permanent:
        return {}
    scores, weights = _unit_scores(host, scoring, batches, stream)
    contributions = {}
    for name in permanent:
        with host.without(name):
            scores_without, _ = _unit_scores(host, scoring, batches, stream)
        contributions[name] = paired_difference(scores, scores_without, weights)
    return contributions


def paired_difference(scores: Tensor, scores_without: Tensor, weights: Tensor) -> Contribution:
    """Compare two networks that were scored on the same samples.

    The samples are a random draw with weights, such as their numbers of labels, so the standard
    error is that of a weighted mean (the linearised ratio estimator). With equal weights it is the
    standard deviation of the differences over the square root of their number.

    Args:
        scores: Score of every sample with the seed, [samples].
        scores_without: Score of every sample without the seed, [samples].
        weights: Weight of every sample, [samples].
    """
    count = int((weights > 0).sum())
    share = weights / weights.sum()
    differences = scores - scores_without
    mean = (share * differences).sum()
    if count < 2:
        return Contribution(value=float(mean), standard_error=None)
    squares = (share * (differences - mean)).square().sum()
    standard_error = math.sqrt(count / (count - 1) * float(squares))
    return Contribution(value=float(mean), standard_error=standard_error)


def _unit_scores(
    host: GrowingModel, scoring: Scoring, batches: Batches, stream: int
) -> tuple[Tensor, Tensor]:
    """Score every sample, or every batch where the metric knows no samples, on all processes.

    Returns:
        Scores and weights, [samples]. A metric that needs all data at once gives one score.
    """
    device = next(host.parameters()).device
    with measuring(host), randomness_kept(host, stream=stream):
        pairs = batches(stream, device)
        if scoring.collects:
            score = scoring.scores(host, pairs).score
            return ranks.shared(host, row(score)), torch.ones(1, dtype=torch.float64)
        scores, weights = scoring.sample_scores(host, ranks.own_parts(pairs))
    return ranks.gathered(host, scores), ranks.gathered(host, weights)
