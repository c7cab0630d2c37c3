"""How much the study of learning trains and plays."""

from dataclasses import dataclass, field

from esper.garden.cases import TRAINING_SEEDS
from esper.simic.agent.ppo_config import PPOConfig
from studies.cohort import CohortSettings
from studies.tuning import TuningSize


@dataclass(frozen=True, kw_only=True)
class C2Size:
    """How much is trained and played."""

    suite: str = "garden"
    trainings: int = 5  # of Tamiyo
    blanked: int = 2  # of the same with observations blanked
    untaught: int = 1  # of the same without a teacher, from rewards alone
    rows: int  # of every training of Tamiyo
    other_rows: int  # of every other training
    cohort: CohortSettings
    cases: int = TRAINING_SEEDS  # of each context, to train on
    tuning: TuningSize = field(default_factory=TuningSize)
    episodes: int = 16  # of each context, to evaluate on
    at_once: int = 64  # episodes that are played together
    save_every: int = 4  # rounds


_PPO = PPOConfig(
    lr=4e-4, epochs=6, minibatches=4, target_kl=0.04, entropy_coef=0.005, gae_lambda=0.95
)
SIZES = {
    "quick": C2Size(
        suite="garden_mlp",
        trainings=2,
        blanked=1,
        untaught=1,
        rows=24,
        other_rows=12,
        cohort=CohortSettings(rounds=3, lesson_rounds=2, ppo=_PPO),
        cases=2,
        tuning=TuningSize(candidates=2, seeds=1, finalists=1, final_seeds=1),
        episodes=1,
        at_once=96,
    ),
    "cpu": C2Size(
        suite="garden_mlp",
        rows=48,
        other_rows=24,
        cohort=CohortSettings(rounds=12, lesson_rounds=4, ppo=_PPO),
        cases=8,
        tuning=TuningSize(candidates=8, seeds=1, finalists=3, final_seeds=2),
        episodes=4,
        at_once=128,
    ),
    "gpu": C2Size(
        rows=400,
        other_rows=176,
        cases=64,
        cohort=CohortSettings(rounds=17, lesson_rounds=11, ppo=_PPO),
        tuning=TuningSize(candidates=40, seeds=2, finalists=8, final_seeds=6),
        at_once=4352,
        save_every=3,
    ),
}
