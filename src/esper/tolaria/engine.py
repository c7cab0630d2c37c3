"""The fused pass and the training step: many hosts with different living seeds as one computation.

Shapes: `V` rows of the pass, `B` batch, `K` seeds that act at one slot (or statistics), `P`
parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper.kasmina.blueprints import find_blueprint
from esper.kasmina.flow_statistics import flow_statistics
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.slot import BlendGate
from esper.leyline import NOTHING, BlueprintCatalogue, SlotSpec
from esper.tolaria.plan import HOST, Plan, PoolKey, SlotPlan, StepPlan
from esper.tolaria.pools import Pool, Template
from esper.tolaria.population_config import PopulationConfig
from esper.tolaria.stacked import Form, stack

if TYPE_CHECKING:
    from esper.tolaria.population import Population

Weights = Mapping[PoolKey, Tensor]  # rows [R, P] of every pool


class _Deliver(torch.autograd.Function):
    """A seed's output as it reaches the host: scaled, or unseen but still taught.

    What is unseen is -0.0, the one number that changes nothing it is added to: -0.0 + 0.0 is 0.0.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.where(value == 0, -0.0, g * value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return torch.where(gradient == 0, 0.0, grad * gradient), None, None


class _Shield(torch.autograd.Function):
    """Passes activations on to seeds; gradient comes back only where the way is open."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, open_: Tensor) -> Tensor:
        ctx.save_for_backward(open_)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (open_,) = ctx.saved_tensors
        return torch.where(open_, grad, 0.0), None


def _over(vector: Tensor, like: Tensor) -> Tensor:
    """A value a row, shaped to multiply rows of activations."""
    return vector.view(-1, *(1,) * (like.dim() - 1))


class Engine:
    """Runs plans over stacked weights. Holds forms and templates, no weights."""

    def __init__(
        self,
        host: SegmentedHost,
        build_host: Callable[[], SegmentedHost],
        catalogue: BlueprintCatalogue,
        config: PopulationConfig,
    ) -> None:
        compiled = partial(_compiled, backend=config.compiler, mode=config.compile_mode)
        self.specs: tuple[SlotSpec, ...] = host.slot_specs()
        self.segments: list[Form] = [
            compiled(stack(segment, f"segments.{index}."))
            for index, segment in enumerate(host.segments)
        ]
        # One template for every kind of seed that fits some slot, and for every slot's gate.
        self.templates: dict[PoolKey, Template] = {}
        for slot, spec in enumerate(self.specs):
            build_gate = partial(BlendGate, spec.channels, spec.channel_axis)
            self.templates["gate", slot, NOTHING] = Template(build_gate, known=True)
            for index, name in enumerate(catalogue.names):
                if catalogue.costs[slot][index] >= 0:
                    build = find_blueprint(name, spec.family).build
                    template = Template(partial(build, spec), compiled, known=_is_own(build))
                    for kind in ("seed", "shadow"):
                        self.templates[kind, slot, index] = template
        self.templates[HOST] = Template(build_host, known=_is_own(type(host)))

    def logits(
        self, weights: Weights, plan: Plan, inputs: Tensor, flow: list[Tensor] | None = None
    ) -> Tensor:
        """The outputs [V, B, ...] of every row of the plan, for inputs [start, B, ...].

        With a list for `flow`, statistics [V, K] of what reaches each slot are added to it.
        """
        hosts = weights[HOST]
        if plan.environment is not None:
            hosts = hosts.index_select(0, plan.environment)
        params = self.templates[HOST].views(hosts)
        h = inputs
        for index, segment in enumerate(self.segments):
            rows = h.shape[0]
            here = {name: p[:rows] for name, p in params.items()} if rows < len(hosts) else params
            h = segment(here, h)
            if index < len(self.specs):
                slot = plan.slots[index]
                if flow is not None:
                    flow.append(flow_statistics(h, self.specs[index].channel_axis))
                if len(slot.forks):
                    h = torch.cat([h, h.index_select(0, slot.forks)])
                h = self._at_slot(weights, index, slot, h)
        return h

    def _at_slot(self, weights: Weights, index: int, slot: SlotPlan, h: Tensor) -> Tensor:
        if not slot.groups:
            return h
        x = h.index_select(0, slot.where)
        if slot.isolated:
            x = _Shield.apply(x, _over(slot.open_, x))  # type: ignore[no-untyped-call]
        parts = x.split([len(group.rows) for group in slot.groups])
        outputs = []
        for group, part in zip(slot.groups, parts, strict=True):
            key: PoolKey = (group.kind, index, group.blueprint)
            template = self.templates[key]
            params = template.views(weights[key].index_select(0, group.rows))
            outputs.append(template.form(params, part))
        g = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        if len(slot.gated):
            gates: PoolKey = ("gate", index, NOTHING)
            own = self.templates[gates].views(weights[gates].index_select(0, slot.gate_rows))
            axis = self.specs[index].channel_axis + 1
            seen = x.index_select(0, slot.gated).movedim(axis, -1)  # [G, B, ..., C]
            flat = seen.flatten(1, -2)  # [G, B * ..., C]
            score = torch.baddbmm(own["bias"].view(-1, 1, 1), flat, own["weight"].unsqueeze(2))
            factor = 2.0 * torch.sigmoid(score).view(*seen.shape[:-1]).unsqueeze(axis)
            g = g.index_copy(0, slot.gated, g.index_select(0, slot.gated) * factor)
        value = _over(slot.value.to(g.dtype), g)
        if slot.isolated:
            taught = _over(slot.gradient.to(g.dtype), g)
            g = _Deliver.apply(g, value, taught)  # type: ignore[no-untyped-call]
        else:
            g = g * value
        return h.index_add(0, slot.where, g.to(h.dtype))


def _compiled(form: Form, backend: str | None, mode: str | None) -> Form:
    """The form as `torch.compile` makes it, one version for each size of group."""
    if backend is None:
        return form
    import torch._dynamo

    # All forms are closures over a few functions, which count together towards the limit.
    torch._dynamo.config.recompile_limit = max(1024, torch._dynamo.config.recompile_limit)
    limit = torch._dynamo.config.accumulated_recompile_limit
    torch._dynamo.config.accumulated_recompile_limit = max(4096, limit)
    return torch.compile(form, backend=backend, mode=mode, dynamic=False)


def _is_own(build: object) -> bool:
    """Is this one of Esper's own hosts or blueprints, whose weights start in a known way?"""
    return str(getattr(build, "__module__", "")).partition(".")[0] == "esper"


def losses_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each row [V], for outputs [V, B, ..., classes], labels [V, B, ...]."""
    return _cross_entropy(outputs, labels).flatten(1).mean(dim=1)


def sample_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """The same for each sample [V, B]; where it has several labels, their mean."""
    found = _cross_entropy(outputs, labels)
    return found.flatten(2).mean(dim=2) if found.dim() > 2 else found


def _cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """[V, B, ...], written out: for few classes torch's own is three times slower on a CPU."""
    if outputs.dtype in (torch.bfloat16, torch.float16):
        outputs = outputs.float()
    chosen = outputs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return outputs.logsumexp(dim=-1) - chosen


def cast_weights(
    pools: Mapping[PoolKey, Pool], compute_dtype: torch.dtype | None
) -> dict[PoolKey, Tensor]:
    """Every pool's rows as the pass uses them, cast once if it computes in another precision."""
    leaves = {key: pool.leaf for key, pool in pools.items()}
    return leaves if compute_dtype is None else {k: v.to(compute_dtype) for k, v in leaves.items()}


def as_inputs(inputs: Tensor, weights: Mapping[PoolKey, Tensor]) -> Tensor:
    """Inputs in the precision of the pass; tokens stay what they are."""
    return inputs.to(weights[HOST].dtype) if inputs.is_floating_point() else inputs


@dataclass(eq=False)
class TrainingStep:
    """Gradients and update for one structure of the population."""

    population: "Population"
    plan: StepPlan

    def __post_init__(self) -> None:
        self.pools, self.config = self.population.pools, self.population.config
        self.keys = [HOST, *self.plan.training.pool_keys()]
        alone = [] if self.plan.isolated is None else self.plan.isolated.pool_keys()
        self.isolated_keys = [key for key in alone if key in self.plan.learners]

    def run(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch an environment, [N, B, ...]; returns the losses [N]."""
        losses, grads = self.gradients(inputs, labels)
        with torch.no_grad():
            pools = [self.pools[key] for key in grads]
            values = list(grads.values())
            torch._foreach_addcmul_([pool.squares for pool in pools], values, values, 1.0)
            self.config.optimiser.step([pool.state for pool in pools], values)
        return losses.detach()

    def gradients(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, dict[PoolKey, Tensor]]:
        """Losses [N] and the gradient of every pool that takes part, [R, P]."""
        engine = self.population.engine
        weights = cast_weights(self.pools, self.config.compute_dtype)
        inputs = as_inputs(inputs, weights)
        losses = losses_of(engine.logits(weights, self.plan.training, inputs), labels)
        found = torch.autograd.grad(losses.sum(), [self.pools[k].leaf for k in self.keys])
        grads = dict(zip(self.keys, found, strict=True))
        if self.population.live is not None:  # host n is row n; the spare row comes last
            grads[HOST][:-1].mul_(self.population.live)
        if (isolated := self.plan.isolated) is not None:
            if isolated.environment is not None:
                inputs, labels = inputs[isolated.environment], labels[isolated.environment]
            weights[HOST] = weights[HOST].detach()
            alone = losses_of(engine.logits(weights, isolated, inputs), labels).sum()
            found = torch.autograd.grad(alone, [self.pools[k].leaf for k in self.isolated_keys])
            for key, grad in zip(self.isolated_keys, found, strict=True):
                others = grads.get(key)
                others = torch.zeros_like(grad) if others is None else others
                grads[key] = torch.where(self.plan.learners[key], grad, others)
        return losses, grads
