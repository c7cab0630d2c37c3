"""Small runs with known contents, without torch: also a program that is killed while it writes.

Shapes: `N` environments, `H` heads, `A` actions of the largest head, `F` features.
"""

import time
from pathlib import Path

import numpy as np

from esper.leyline.ops import LifecycleOp
from esper.leyline.stages import SeedStage
from esper.nissa import (
    Decisions,
    EpisodeEnded,
    Event,
    Hub,
    LifecycleChanged,
    RunLayout,
    RunReader,
    RunStore,
    Sampled,
    Stepped,
    UpdateMetrics,
)

OPS = tuple(op.name for op in LifecycleOp)
SLOTS, BLUEPRINTS, BLENDS = ("early", "mid", "late"), ("norm", "conv"), ("IMMEDIATE", "RAMP")
FEATURES = ("epoch", "early:alpha", "mid:alpha", "late:alpha")
LAYOUT = RunLayout(
    heads=("op", "slot", "blueprint", "blend"),
    actions=(OPS, SLOTS, BLUEPRINTS, BLENDS),
    relevance=(
        (True, False, False, False),
        (True, True, True, True),
        *((True, True, False, False),) * 3,
    ),
    features=FEATURES,
    slots=SLOTS,
    blueprints=BLUEPRINTS,
)
STEPS, ENVS = 5, 6


def decisions(
    round: int, step: int, envs: int = ENVS, watched: int = ENVS, **more: object
) -> Decisions:
    draw = np.random.default_rng((round, step))
    return Decisions(
        round=round,
        step=step,
        actions=draw.integers(0, (5, 3, 2, 2), (envs, 4)),
        values=draw.normal(size=envs),
        log_probs=-draw.random((envs, 4)),
        observations=draw.random((envs, len(FEATURES)))[:watched],
        masks=(draw.random((envs, 4, 5)) < 0.5)[:watched],
        **more,
    )


def stepped(round: int, step: int, envs: int = ENVS) -> Stepped:
    draw = np.random.default_rng((round, step, 1))
    terms = {"objective": draw.normal(size=envs), "rent": -draw.random(envs)}
    accuracy = 100 * draw.random(envs)
    rewards = terms["objective"] + terms["rent"]
    return Stepped(
        round=round, step=step, rewards=rewards, terms=terms, measures={"accuracy": accuracy}
    )


def planted(round: int, step: int, env: int = 0, slot: int = 1) -> LifecycleChanged:
    """DORMANT to TRAINING in one step."""
    stages = (SeedStage.DORMANT, SeedStage.GERMINATED, SeedStage.TRAINING)
    return LifecycleChanged(
        round=round,
        step=step,
        env=[env, env],
        slot=[slot, slot],
        before=stages[:2],
        after=stages[1:],
        cause=[LifecycleOp.GERMINATE, -1],
        blueprint=[1, 1],
        reason=["room for 40 parameters", "passes by itself"],
    )


def ended(round: int, envs: int = ENVS) -> EpisodeEnded:
    draw = np.random.default_rng((round, 2))
    return EpisodeEnded(
        round=round,
        step=STEPS - 1,
        env=range(envs),
        context=["gain"] * envs,
        seed=range(100, 100 + envs),
        validation=90 * draw.random(envs),
        control=80 * draw.random(envs),
        net_gain=draw.normal(size=envs),
        returns=draw.normal(size=envs),
        added=draw.integers(0, 500, envs),
        exposure=draw.random(envs),
        interventions=draw.integers(0, 4, envs),
        rolled_back=draw.random(envs) < 0.2,
    )


def a_round(round: int, envs: int = ENVS) -> list[Event]:
    """All that a round emits, in order."""
    events: list[Event] = []
    for step in range(STEPS):
        events += [decisions(round, step, envs), stepped(round, step, envs)]
        events.append(Sampled(round=round, step=step, values={"train_seconds": 0.1 * step}))
        if step == 1:
            events.append(planted(round, step, slot=round % 3))
    metrics = {"kl": 0.01 * round, "heads.op.entropy": 0.5}
    return [*events, ended(round, envs), UpdateMetrics(round=round, metrics=metrics)]


def written(path: Path, rounds: int) -> Path:
    with RunStore(path, LAYOUT) as store:
        for number in range(1, rounds + 1):
            store.write(a_round(number))
            store.commit(number)
    return path


def write_until_killed(path: Path) -> None:
    """Go on after the last whole round, as a resumed run would; tells of every commit."""
    store = RunStore(path, LAYOUT)
    first = store.last_commit or 0
    store.rewind(first)
    with Hub(store) as hub:
        print("ready", flush=True)
        for number in range(first + 1, first + 10_000):
            for event in a_round(number):
                hub.emit(event)
                time.sleep(0.0002)
            assert hub.commit(number)
            print(number, flush=True)


def counted(reader: RunReader) -> dict[str, int]:
    """How many events of each kind there are."""
    return dict(reader.query("SELECT kind, count(*) FROM events GROUP BY kind").rows)
