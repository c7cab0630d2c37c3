"""Masks with which the entropy of each head counts, also where its op was not chosen."""

import pytest
import torch
from torch import Tensor

from esper.leyline import HEADS, ActionSpace, Legality, LifecycleOp
from esper.leyline.heads import Head, HeadTable
from esper.leyline.legality import relevance_table
from esper.tamiyo import SampledActions, independent_heads, sample_actions
from esper.tamiyo.distributions import condition_index
from tests.tamiyo.spaces import esper_space, random_legality, space_of

ROWS = 64


def uniform_logits(space: ActionSpace) -> dict[str, Tensor]:
    return {
        name: torch.zeros(ROWS, size) for name, size in zip(space.names, space.sizes, strict=True)
    }


def sample(space: ActionSpace, legality: Legality, seed: int) -> SampledActions:
    generator = torch.Generator().manual_seed(seed)
    return sample_actions(uniform_logits(space), legality, generator=generator)


def with_prune_only_head() -> ActionSpace:
    """A table in which the relevant ops of two heads do not contain each other."""
    new_head = Head(
        name="delay", size=lambda catalogue: 3, matters_for=frozenset({LifecycleOp.PRUNE})
    )
    return space_of(HeadTable(LifecycleOp, (*HEADS.heads, new_head)))


@pytest.mark.parametrize("space", [esper_space(), with_prune_only_head()], ids=["esper", "prune"])
@pytest.mark.parametrize("seed", range(3))
def test_entropy_mask_is_that_of_a_legal_op(space: ActionSpace, seed: int) -> None:
    legality = random_legality(space, ROWS, torch.Generator().manual_seed(seed))
    sampled = sample(space, legality, seed)
    relevance = relevance_table(space.relevance, torch.device("cpu"))
    assert sampled.entropy_masks is not None
    assert sampled.entropy_conditions is not None
    for row in range(ROWS):
        legal_ops = legality.mask("op", sampled.actions)[row]
        for position, (head, size) in enumerate(zip(space.names, space.sizes, strict=True)):
            entropy_mask = sampled.entropy_masks[row, position, :size]
            condition = int(sampled.entropy_conditions[row, position])
            usable_ops = legal_ops & relevance[:, position]
            if relevance[sampled.actions[row, 0], position]:
                # Relevant for the chosen op: the mask of the choice itself.
                assert torch.equal(entropy_mask, sampled.masks[row, position, :size])
                chosen = condition_index(space, head, sampled.actions)[row]
                assert condition == int(chosen)
            elif bool(usable_ops.any()):
                # The row of the head's own table that the condition names.
                table = legality.masks[head][row].reshape(-1, size)
                assert torch.equal(entropy_mask, table[condition])
            else:
                assert entropy_mask.sum() == 1, "the head cannot become relevant"


def test_independent_heads_need_no_entropy_masks() -> None:
    space = independent_heads((3, 4))
    sampled = sample(space, Legality(space, ROWS, {}), 0)
    assert sampled.entropy_masks is None
    assert sampled.entropy_conditions is None


def test_head_without_usable_op_has_a_single_entropy_action() -> None:
    space = esper_space()
    op_mask = torch.zeros(ROWS, space.size("op"), dtype=torch.bool)
    op_mask[:, LifecycleOp.WAIT] = True
    sampled = sample(space, Legality(space, ROWS, {"op": op_mask}), 0)
    assert sampled.entropy_masks is not None
    assert bool((sampled.entropy_masks[:, 1:].sum(-1) == 1).all())


def test_blueprints_count_where_germinate_is_legal_but_not_chosen() -> None:
    space = esper_space()
    logits = uniform_logits(space)
    logits["op"][:, LifecycleOp.WAIT] = 50.0
    sampled = sample_actions(logits, Legality(space, ROWS, {}), greedy=True)
    assert bool((sampled.actions[:, 0] == LifecycleOp.WAIT).all())
    assert bool((sampled.masks[:, space.index("blueprint")].sum(-1) == 1).all())
    assert sampled.entropy_masks is not None
    num_legal = sampled.entropy_masks[:, space.index("blueprint")].sum(-1)
    assert bool((num_legal == space.size("blueprint")).all())
