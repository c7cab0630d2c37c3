"""Who decides: never, at random, by schedule, by rule, by knowing the answer, or learned."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .auditioning import Audition, AuditionConfig
    from .by_name import controller_names, make_controller, register_controller
    from .learned import (
        LearnedController,
        TokenController,
        controller_of_network,
        sample_with_draws,
    )
    from .proposals import Proposal, first_legal
    from .protocol import (
        Auditioning,
        Controller,
        Privileged,
        Remembering,
        SideBySide,
        needs_contributions,
    )
    from .racing import Race, RaceConfig
    from .rules import Gap, Heuristic, HeuristicConfig, NeverGrow, Periodic, Plateau, RandomLegal
    from .schedules import FixedSchedule, Oracle, RowSchedule, Schedule
    from .specs import Arm

__getattr__, __dir__, __all__ = attach(__name__)
