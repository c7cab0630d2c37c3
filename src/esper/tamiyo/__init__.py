"""tamiyo: the brain. Masked distributions, the recurrent factored actor-critic, controllers."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .choosing import (
        Choice,
        InvalidStateMachineError,
        MaskedCategorical,
        choose,
        independent_heads,
        logits_given,
    )
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
    from .features import Feature, FeatureTable, signals_to_features
    from .network import (
        Evaluation,
        FactoredRecurrentActorCritic,
        Hidden,
        Outlook,
        RecurrentActorCritic,
        RunningNorm,
        reset_hidden,
        run_sequences,
        unwrapped,
    )
    from .token_layout import TokenLayout
    from .token_network import TokenActorCritic

__getattr__, __dir__, __all__ = attach(__name__)
