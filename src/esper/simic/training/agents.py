"""Trained agents as controllers, from a run or from an agent's own directory."""

from pathlib import Path

from esper.simic.agent.ppo import PPOAgent
from esper.simic.training.runs import BEST, CONFIG, RunError
from esper.tamiyo.controllers import LearnedController
from esper.tamiyo.controllers.learned import is_kept, kept_controller


def load_controller(
    path: str | Path, *, name: str | None = None, device: str = "cpu"
) -> LearnedController:
    """The best agent of a run, a kept controller or a saved agent; it decides greedily."""
    folder = Path(path)
    name = name or f"tamiyo({folder.name})"
    if (folder / CONFIG).is_file():
        if not (folder / BEST).is_dir():
            raise RunError(
                f"{folder} has no agent yet",
                given="it was never evaluated",
                fix=f"go on with: esper resume {folder}",
            )
        agent = folder / BEST
    elif is_kept(folder):
        controller = kept_controller(folder, name)
        controller.network.to(device)
        return controller
    else:
        agent = folder
    loaded = PPOAgent.load(agent, device=device)
    return LearnedController(loaded.network, name=name)
