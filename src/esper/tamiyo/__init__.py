"""tamiyo: observations, masked distributions, the recurrent actor-critics, and controllers."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .controllers import (
        Controller,
        HeuristicConfig,
        LearnedController,
        Privileged,
        TokenController,
        controller_names,
        make_controller,
        register_controller,
    )
    from .distributions import (
        InvalidStateMachineError,
        MaskedCategorical,
        SampledActions,
        independent_heads,
        sample_actions,
        stack_logits,
    )
    from .features import Feature, FeatureTable, signals_to_features
    from .network import FactoredRecurrentActorCritic
    from .normalization import RunningNorm
    from .recurrent import ActorCriticOutput, Evaluation, RecurrentActorCritic, unwrap_network
    from .sequences import Hidden, reset_hidden, run_sequences
    from .skip_network import SkipActorCritic
    from .token_layout import TokenLayout
    from .token_network import TokenActorCritic

__getattr__, __dir__, __all__ = attach(__name__)
