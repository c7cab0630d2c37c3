"""kasmina: the body. Hosts, slots, seeds, blueprints, isolation, blending, lifecycle, export."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .blueprints import (
        ScalarGate,
        blueprint,
        blueprint_names,
        build_catalogue,
        unregister_blueprint,
        zeroed,
    )
    from .gates import GATES, GateRules, Situation, explain, legality
    from .hosts import SegmentedHost, build_host
    from .isolation import Isolation
    from .optimizer_surgery import (
        add_parameters,
        prepare_groups,
        remove_parameters,
        require_same_parameters,
    )
    from .plain_module import export_module
    from .probe import Target
    from .program_export import export_onnx, export_program
    from .python_export import export_python
    from .slotted import SlottedModel
    from .transitions import decide, pass_time, remove_now

__getattr__, __dir__, __all__ = attach(__name__)
