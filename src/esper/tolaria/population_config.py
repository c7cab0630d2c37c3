"""How a population trains, and what it reports.

Shapes: `N` environments, `S` slots, `P` parameters of one host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from esper.kasmina import GateRules, Isolation
from esper.leyline import EsperError, Lifecycle
from esper.leyline.constants import BACKENDS
from esper.leyline.errors import require_known
from esper.leyline.settings import NotNegative, Whole, require_settings
from esper.leyline.shadows import ShadowReadings
from esper.tolaria.optimisers import AdamW, RowOptimiser
from esper.tolaria.plan import PoolKey

# The other modes of torch.compile make CUDA graphs of their own, where the population makes one.
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, kw_only=True)
class PopulationConfig:
    """How a population trains. Each environment may be given rates of its own later."""

    rate: NotNegative = 3e-3
    decay: NotNegative = 0.0
    optimiser: RowOptimiser = field(default_factory=AdamW)
    isolation: Isolation = Isolation.DUAL_PASS
    rules: GateRules = field(default_factory=GateRules)
    budget: Whole | None = None  # parameters
    blueprints: tuple[str, ...] | None = None
    # "fused": large operations over all hosts; "chip": a block of threads a host, a core for all;
    # "auto": the chip where it can be. Only rounding differs, so results do not depend on it.
    backend: str = field(default="auto", repr=False)
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None  # bfloat16: weights are cast once per pass
    graphs: bool = True  # on CUDA: replay the step as one graph
    compiler: str | None = None  # a backend of torch.compile for the parts of a pass
    compile_mode: str | None = None  # of the compiler "inductor", as torch.compile takes it
    deterministic: bool = False  # on CUDA: the same run twice is the same to the bit, but slower

    def __post_init__(self) -> None:
        object.__setattr__(self, "isolation", Isolation.named(self.isolation))
        require_settings(self, "A population's")
        require_known("backend of a population", self.backend, BACKENDS)
        if self.compile_mode is not None:
            if self.compiler != "inductor":
                raise EsperError(
                    "Only one compiler has modes",
                    given=f"compile_mode {self.compile_mode!r}, compiler {self.compiler!r}",
                    fix='choose compiler="inductor"',
                )
            require_known("compile mode", self.compile_mode, COMPILE_MODES)


@dataclass(frozen=True)
class EpochRecord:
    """What one epoch measured of every environment."""

    loss: Tensor  # [N] mean over batches
    host_gradient: Tensor  # [N] root mean square of the gradient norm over the epoch
    seed_gradient: Tensor  # [N, S] the same for each seed; NaN where there is none
    shadowed: Tensor | None = None  # [N, S, P] share of the batches that each shadow learned from


@dataclass(frozen=True)
class SplitScores:
    """Loss and accuracy (percent) of rows on a split."""

    loss: Tensor
    accuracy: Tensor


@dataclass(frozen=True)
class Snapshot:
    """Everything that makes up the environments of a population at one moment.

    Random streams need no place of their own: they follow from seeds and counters.
    """

    lifecycle: Lifecycle
    kept: Mapping[str, Tensor]  # [N] or [N, S] each
    live: Tensor | None  # [N, P] weights of hosts that exist
    tensors: Mapping[PoolKey, Mapping[str, Tensor]]  # what each pool keeps by row
    shadow_rows: Tensor  # [N, S, P] where each shadow lives
    readings: ShadowReadings
