"""Small runs with a story, written through the hub as training writes them.

Shapes: `N` environments, `H` heads.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from esper.archive import write_archive
from esper.leyline.ops import Cause, LifecycleOp
from esper.leyline.stages import SeedStage
from esper.nissa import (
    AnomalyFound,
    Decisions,
    EpisodeEnded,
    Evaluated,
    Hub,
    LifecycleChanged,
    RolledBack,
    RunLayout,
    RunStore,
    Sampled,
    Stepped,
    UpdateMetrics,
)
from esper.simic.training.training_runs import KIND, VERSION

OPS = tuple(op.name for op in LifecycleOp)
BLUEPRINTS = ("norm", "gate", "bottleneck")
STEPS, ENVS = 10, 6
CONTEXTS = ("xor-0.2", "gain-2.0", "noise-80")

CONFIG = """suite = "garden_mlp"
rounds = {rounds}
envs = {envs}
horizon = 10

[ppo]
target_kl = 0.05

[evaluation]
every = 1
baselines = ["random", "heuristic"]
"""

# What every third environment does: (step, op); the others wait to the end.
SCRIPT = {
    1: LifecycleOp.GERMINATE,
    3: LifecycleOp.ADVANCE,
    6: LifecycleOp.FOSSILIZE,
}


def layout(slots: Sequence[str] = ("early", "mid", "late")) -> RunLayout:
    return RunLayout(
        heads=("op", "slot", "blueprint", "blend"),
        actions=(OPS, tuple(slots), BLUEPRINTS, ("IMMEDIATE", "RAMP", "GATE")),
        relevance=(
            (True, False, False, False),
            (True, True, True, True),
            *((True, True, False, False),) * 3,
        ),
        slots=tuple(slots),
        blueprints=BLUEPRINTS,
    )


class Run:
    """A run's directory that is being written."""

    def __init__(
        self, path: Path, *, planned: int = 2, envs: int = ENVS, slots: int = 3, rows: int = 256
    ) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.toml").write_text(CONFIG.format(rounds=planned, envs=envs))
        names = ("early", "mid", "late") if slots == 3 else [f"s{n}" for n in range(slots)]
        self.path, self.envs, self.layout = path, envs, layout(names)
        self.hub = Hub(RunStore(path, self.layout, rows=rows))
        self.judged: list[list[Any]] = []

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *failure: object) -> None:
        self.hub.close()

    def grows(self, env: int) -> bool:
        return env % 3 != 2

    def slot(self, env: int) -> int:
        return env % len(self.layout.slots)

    def play(self, number: int, contexts: Sequence[str] = CONTEXTS, failing: int = -1) -> None:
        """A round: two thirds of the environments grow a seed; `failing` is rolled back."""
        for step in range(STEPS):
            self._step(number, step, failing)
        envs = np.arange(self.envs)
        grown = np.array([self.grows(env) for env in envs])
        self.hub.emit(
            EpisodeEnded(
                round=number,
                step=STEPS - 1,
                env=envs,
                context=[contexts[env % len(contexts)] for env in envs],
                seed=envs,
                validation=50.0 + 5.0 * grown + envs,
                control=np.full(self.envs, 50.0),
                net_gain=np.where(grown, envs + 1.5 - 2.0 * (envs % 2), 0.0),
                returns=np.where(grown, 0.1 * envs, 0.0),
                added=120 * grown,
                exposure=0.2 * grown,
                interventions=3 * grown,
                rolled_back=envs == failing,
            )
        )

    def _step(self, number: int, step: int, failing: int) -> None:
        envs = np.arange(self.envs)
        op = SCRIPT.get(step, LifecycleOp.WAIT)
        actions = np.zeros((self.envs, 4), dtype=int)
        for env in envs:
            if self.grows(env) and op:
                actions[env] = (op, self.slot(env), env % 3, 1)
                if op is not LifecycleOp.GERMINATE:
                    actions[env, 2:] = 0
        self.hub.emit(
            Decisions(
                round=number,
                step=step,
                actions=actions,
                values=np.zeros(self.envs),
                log_probs=np.zeros((self.envs, 4)),
            )
        )
        alpha = min(max(0.0, (step - 2) / 3), 1.0)
        self.hub.emit(
            Stepped(
                round=number,
                step=step,
                rewards=np.zeros(self.envs),
                measures={
                    "accuracy": 40.0 + step + envs,
                    "committed": 40.0 + 0.5 * step + envs,
                    **{
                        f"alpha_{name}": np.array(
                            [alpha if self.grows(e) and self.slot(e) == place else 0 for e in envs]
                        )
                        for place, name in enumerate(self.layout.slots)
                    },
                },
            )
        )
        self._change(number, step)
        if failing >= 0 and step == STEPS - 1:
            self.hub.emit(
                RolledBack(round=number, step=step, env=[failing], reason=["loss is NaN"])
            )

    def _change(self, number: int, step: int) -> None:
        stage = SeedStage
        path = {
            1: (stage.DORMANT, stage.GERMINATED, stage.TRAINING),
            3: (stage.TRAINING, stage.BLENDING),
            5: (stage.BLENDING, stage.HOLDING),
            6: (stage.HOLDING, stage.FOSSILIZED),
        }.get(step)
        growing = [env for env in range(self.envs) if self.grows(env)]
        for before, after in zip(path or (), (path or ())[1:], strict=False):
            self.hub.emit(
                LifecycleChanged(
                    round=number,
                    step=step,
                    env=growing,
                    slot=[self.slot(env) for env in growing],
                    before=[before] * len(growing),
                    after=[after] * len(growing),
                    cause=[SCRIPT.get(step, Cause.TIME)] * len(growing),
                    blueprint=[env % 3 for env in growing],
                )
            )

    def learn(self, number: int) -> None:
        metrics = {"kl": 0.01 * number, "explained_variance": 0.3, "gradient_norms.value": 0.5}
        for head in self.layout.heads:
            metrics |= {
                f"heads.{head}.entropy": 0.9,
                f"heads.{head}.clip_fraction": 0.1,
                f"gradient_norms.heads.{head}": 1.0,
            }
        self.hub.emit(UpdateMetrics(round=number, metrics=metrics))
        times = {"play": 10.0, "step": 7.0, "decide": 1.0, "report": 0.5, "learn": 2.0}
        values = {f"seconds_{name}": value for name, value in times.items()}
        self.hub.emit(Sampled(round=number, values=values))

    def judge(self, number: int, controller: str, score: float, spread: float = 0.1) -> None:
        self.judged.append([controller, number, score, score - spread, score + spread, 6])
        keep(self.path, number, self.judged)
        self.hub.emit(
            Evaluated(
                round=number,
                controller=controller,
                context=["all", *CONTEXTS],
                score=[score] * 4,
                low=[score - spread] * 4,
                high=[score + spread] * 4,
                episodes=[6, 2, 2, 2],
            )
        )

    def find(self, number: int) -> None:
        self.hub.emit(
            AnomalyFound(
                round=number,
                name="entropy_collapse",
                head="op",
                raised=True,
                seen=0.0004,
                threshold=0.001,
                updates=5,
                message="Entropy collapse of head 'op': 0.0004, below 0.001.",
                advice="Raise entropy_coef.",
            )
        )


def keep(path: Path, number: int, judged: list[list[Any]], **controls: Any) -> Path:
    """A checkpoint of a round, as far as reports look at it."""
    notes = {"round": number, "parts": {}, "eval_history": judged}
    place = path / "checkpoints" / f"round-{number:06d}" / "state"
    write_archive(place, kind=KIND, version=VERSION, tensors=controls, notes=notes)
    return place


def whole_run(path: Path) -> Path:
    """Two rounds with everything in them."""
    with Run(path) as run:
        run.judge(0, "random", -0.3)
        run.judge(0, "heuristic", 0.35)
        for number, score in ((1, 0.1), (2, 0.4)):
            run.play(number, failing=4 if number == 2 else -1)
            run.learn(number)
            run.judge(number, "tamiyo", score)
        run.find(2)
    return path
