"""The garden as an environment: episodes, rewards, controls, evaluation and the atlas."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .atlas import Atlas, Plans, arms_of, measure_atlas, search_plans, shipped_atlas
    from .cases import EVALUATION_SEED, TRAINING_SEEDS, Case, Deal, Draw
    from .contexts import Context, Lesion, Source, by_shape, lesion_mask
    from .environment import Garden, Transition
    from .episodes import Episodes, Epoch
    from .evaluation import Result, ResultFile, Standing, evaluate, standings
    from .families import FAMILIES, DataFamily, register_family
    from .greenhouse import Greenhouse, Plot
    from .playing import Controls, Job, Played, Playground
    from .plots import LAYOUT, Bed, Plots
    from .suites import SUITES, Suite, find_suite, load_suite, save_suite

__getattr__, __dir__, __all__ = attach(__name__)
