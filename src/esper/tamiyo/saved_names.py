"""Names that networks had in files of Esper 0.1, and their names today.

Agents and controllers of Esper 0.1 are loaded through this table.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

# Parts of a tensor's name, which are separated by dots: in Esper 0.1 -> today.
RENAMED_PARTS = {
    # FactoredRecurrentActorCritic
    "features": "feature_net",
    "memory_norm": "lstm_ln",
    "visible": "feature_mask",
    # TokenActorCritic
    "first": "mixing_before",
    "second": "mixing_after",
    "recalled": "memory_proj",
    "trust": "rule_logit_scale",
    "whole": "global_token",
    "own": "slots",
    "seeds": "candidates",
    "ways": "sources",
}
ORIGINAL_PARTS = {new: old for old, new in RENAMED_PARTS.items()}


def current_name(name: str, head_names: Sequence[str]) -> str:
    """Return today's name of a tensor of a network.

    Args:
        name: Name in Esper 0.1, where heads were numbered, or today's name.
        head_names: Names of the action heads in the order of the action space.
    """
    parts = [RENAMED_PARTS.get(part, part) for part in name.split(".")]
    if parts[0] == "heads" and parts[1].isdigit():
        parts[1] = head_names[int(parts[1])]
    return ".".join(parts)


def original_name(name: str, head_names: Sequence[str]) -> str:
    """Return the name that a tensor of a network had in Esper 0.1."""
    parts = name.split(".")
    if parts[0] == "heads" and parts[1] in head_names:
        parts[1] = str(list(head_names).index(parts[1]))
    return ".".join(ORIGINAL_PARTS.get(part, part) for part in parts)


def with_current_names(
    tensors: Mapping[str, Tensor], head_names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the tensors of a network under today's names."""
    return {current_name(name, head_names): tensor for name, tensor in tensors.items()}
