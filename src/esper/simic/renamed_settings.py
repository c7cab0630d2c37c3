"""Settings of Esper 0.1 and their names today.

Settings that Esper 0.1 saved, in `config.toml` and in checkpoints, are read through this table.
Imports no torch.
"""

import re
from collections.abc import Mapping
from typing import Any

from esper.leyline.errors import DataError
from esper.leyline.settings import NONE

LAST_COMMIT = "28b7a14"  # of Esper 0.1

# Name in Esper 0.1 -> name today.
RENAMED_RUN_SETTINGS = {
    "cases": "seeds_per_context",
    "plots": "populations",
    "players": "rollouts_per_case",
    "patience": "prune_logit_bias",
    "final_rate": "final_lr_fraction",
    "watched": "logged_envs",
}
RENAMED_PPO_SETTINGS = {
    "learning_rate": "lr",
    "sequence": "sequence_length",
}
RENAMED_CHECKPOINT_NOTES = {
    "judged": "eval_history",
    "undone": "last_update_reverted",
}


def rename_keys(values: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return the values under today's names.

    Raises:
        DataError: A value is present under both names.
    """
    current: dict[str, Any] = {}
    for name, value in values.items():
        current_name = renamed.get(name, name)
        if current_name in current:
            raise DataError(
                f"The setting {current_name!r} is given twice",
                given=f"also by its old name: {', '.join(sorted(renamed.keys() & values.keys()))}",
                fix="remove the old name",
            )
        current[current_name] = value
    return current


def current_run_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a training run under today's names.

    Raises:
        DataError: A setting has a value that is not supported any more.
    """
    current = rename_keys(settings, RENAMED_RUN_SETTINGS)
    if "processes" in current:
        current["processes"] = _number_of_processes(current["processes"])
    if isinstance(current.get("ppo"), Mapping):
        current["ppo"] = current_ppo_settings(current["ppo"])
    return current


def current_ppo_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the learner under today's names.

    In Esper 0.1 the network was compiled if `compile_backend` was not none.
    """
    current = rename_keys(settings, RENAMED_PPO_SETTINGS)
    if "compile_backend" not in current or "compile_network" in current:
        return current
    has_backend = current["compile_backend"] not in (None, NONE)
    if not has_backend:
        del current["compile_backend"]
        current["compile_network"] = False
    elif "sequence" in settings:  # all settings of Esper 0.1, not a file that sets a few
        current["compile_network"] = True
    return current


def _number_of_processes(value: object) -> object:
    """Convert a number of processes that Esper 0.1 saved as a text.

    Raises:
        DataError: The text is a range such as "2:4", the fewest and the most processes.
    """
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"\d+:\d+", value):
        raise DataError(
            "The setting 'processes' cannot be a range any more",
            given=repr(value),
            valid="a whole number from 1",
            fix=f"change it, or use Esper 0.1.x (commit {LAST_COMMIT}), which reads ranges",
        )
    if re.fullmatch(r"\d{1,9}", value):
        return int(value)
    return value
