"""leyline: the shared language. Stages, ops, heads, slots, arrays, protocols, errors, constants."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .catalogue import BlueprintCatalogue, Trait
    from .constants import (
        DEFAULT_ADAM_EPSILON,
        DEFAULT_EMBARGO,
        DEFAULT_ENTROPY_COEF,
        DEFAULT_EPISODE_LENGTH,
        DEFAULT_GAE_LAMBDA,
        DEFAULT_GAMMA,
        DEFAULT_LEARNING_RATE,
        DEFAULT_LSTM_HIDDEN_DIM,
        DEFAULT_LSTM_LAYERS,
        DEFAULT_PRUNE_TEMPO,
        DEFAULT_RENT,
        DEFAULT_SLOT_COUNT,
        KL_EARLY_STOP_MULTIPLIER,
        MASK_VALUE,
        RATIO_COLLAPSE,
        RATIO_EXPLOSION,
    )
    from .errors import (
        ActionError,
        AgreementError,
        BlueprintError,
        DataError,
        DuplicateNameError,
        EsperError,
        ExportError,
        GateRefusedError,
        IllegalTransitionError,
        OptimizerMismatchError,
        SlotError,
        UnknownNameError,
    )
    from .heads import CANONICAL_ACTION, HEAD_NAMES, HEADS, ActionSpace, Head, HeadTable
    from .legality import Actions, Legality
    from .lifecycle import NOTHING, Lifecycle, TransitionRecord, Transitions
    from .ops import Blend, Cause, LifecycleOp
    from .protocols import SeedSlotProtocol, SeedStateProtocol, SlottedHostProtocol
    from .results import (
        HeadGradientNorms,
        HeadUpdateMetrics,
        PerHead,
        PerHeadAdvantages,
        PPOUpdateMetrics,
    )
    from .slots import (
        CANONICAL_SLOTS,
        Family,
        Layout,
        Reach,
        SlotConfig,
        SlotSpec,
        ordered_slots,
        require_agreement,
    )
    from .stages import LIVING_STAGES, OCCUPIED_STAGES, TRANSITIONS, SeedStage, check_transition

__getattr__, __dir__, __all__ = attach(__name__)
