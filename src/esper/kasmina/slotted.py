"""A model with slots: any `nn.Module`, its seeds, and their lifecycle as arrays with N = 1."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.kasmina import optimizer_surgery as surgery
from esper.kasmina.blueprints import build_catalogue, find_blueprint, learning_rate_scales
from esper.kasmina.gates import UNLIMITED, GateRules, Situation, explain, legality
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.isolation import Isolation, randomness_kept, state_kept
from esper.kasmina.probe import Place, Sample, Target, probe
from esper.kasmina.slot import Bond, Mode, Seed, Slot, build_seed, set_tap
from esper.kasmina.transitions import decide, pass_time, remove_now
from esper.leyline import HEADS, Actions, Blend, Legality, LifecycleOp, SeedStage
from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.constants import GATE_LEARNING_RATE_SCALE
from esper.leyline.errors import AgreementError
from esper.leyline.lifecycle import NOTHING, Lifecycle, Transitions
from esper.leyline.slots import SlotSpec, require_agreement
from esper.leyline.streams import derive_seed

T = TypeVar("T")

_LIFECYCLE_PREFIX = "lifecycle."
_NAMES_KEY = "blueprint_names"
_COUNTERS_KEY = "counters"  # seeds planted, seed passes run: what the random streams depend on


class _Entry(Generic[T]):
    """An attribute of a view: what an array of the lifecycle holds for its slot now."""

    def __init__(self, array: str, kind: Callable[[Any], T]) -> None:
        self.array, self.kind = array, kind

    def __get__(self, view: "SlotView", owner: object = None) -> T:
        array: Tensor = getattr(view.host.lifecycle, self.array)
        return self.kind(array[0, view.slot].item())


@dataclass(frozen=True)
class SlotView:
    """One slot as it is now and, when it is occupied, its seed: for people and for the protocols.

    Holds nothing itself; what is about a seed has no meaning without one.
    """

    host: "SlottedModel"
    slot: int

    stage = _Entry("stage", SeedStage)
    blend = _Entry("blend", Blend)
    alpha = _Entry("alpha", float)
    age = _Entry("age", int)
    epochs_in_stage = _Entry("epochs_in_stage", int)
    params = _Entry("params", int)

    @property
    def blueprint(self) -> str:
        return self.host.catalogue.names[int(self.host.lifecycle.blueprint[0, self.slot])]

    @property
    def contribution(self) -> float | None:
        life = self.host.lifecycle
        known = bool(life.contribution_known[0, self.slot])
        return float(life.contribution[0, self.slot]) if known else None

    @property
    def spec(self) -> SlotSpec:
        return self.host.specs[self.slot]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def seed(self) -> "SlotView | None":
        return self if bool(self.host.lifecycle.occupied[0, self.slot]) else None


class SlottedModel(nn.Module):
    """Wraps a model so that seeds can be planted on the outputs of its submodules.

    The model itself is not changed: its class, parameters and names stay, and while no seed is
    active its forward is exactly the original's. Esper's own hosts announce their slots; for any
    other model name the places and give a sample input.

    One epoch by hand::

        for x, y in batches:
            optimizer.zero_grad()
            loss(host(x), y).backward()
            if host.has_isolated_seeds:
                with host.seed_pass():
                    loss(host(x), y).backward()
            optimizer.step()
        host.measure(contribution=..., gradient=...)
        host.pass_time()
        host.germinate("early", "conv", blend="ramp")
    """

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[Place | Target | str] | None = None,
        sample: Sample | None = None,
        *,
        isolation: Isolation | str = Isolation.DUAL_PASS,
        rules: GateRules | None = None,
        budget: int | None = None,
        blueprints: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.slot_places = probe(model, places, sample)  # where the slots sit, in order
        self.model = model
        self.specs = tuple(place.spec for place in self.slot_places)
        self._bond = Bond(tied=True)
        self._slots = [Slot(spec, self._bond) for spec in self.specs]
        self.slots = nn.ModuleList(self._slots)
        self.isolation = Isolation.named(isolation)
        self.rules = rules or GateRules()
        self.budget = torch.tensor([UNLIMITED if budget is None else budget])
        self.catalogue = catalogue_of(model, self.slot_places, blueprints)
        self.space = HEADS.resolve(self.catalogue)
        self.lifecycle = Lifecycle.dormant(1, len(self.specs))
        self.seed = seed
        self._planted = 0
        self._seed_passes = 0
        self._in_seed_pass = self._any_training = False
        self._overrides: dict[int, float] = {}  # alphas by slot, in place of their own
        self.optimizers: list[Optimizer] = []  # that are tracked

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= past_results(self.model)
        memo[id(self)] = twin = type(self).__new__(type(self))
        twin.__setstate__(deepcopy(self.__dict__, memo))
        return twin

    # --- running -------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_seed_pass:
            args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        # Not `self.model`, which torch looks for in three places: this is in every step.
        return self._modules["model"](*args, **kwargs)  # type: ignore[misc]

    @property
    def has_isolated_seeds(self) -> bool:
        """Is there a seed that learns only in `seed_pass`?"""
        return self._any_training and self.isolation is Isolation.DUAL_PASS

    def seed_pass(self) -> AbstractContextManager[None]:
        """Inside, TRAINING seeds are fully on and nothing but them receives gradient.

        Run forward and backward inside. The host's gradients, buffers and random stream are
        left as they were.
        """
        self._seed_passes += 1
        stream = derive_seed(self.seed, "seed pass", self._seed_passes)
        return self.beside(stream, self._training_slots())

    @contextmanager
    def beside(self, stream: int, learning: Sequence[int] = ()) -> Iterator[None]:
        """Inside, passes run with random numbers from this stream: seeds of the slots `learning`
        are fully on, nothing else learns, and what is left behind in all else is undone.
        """
        own = {id(each) for index in learning for each in self._slots[index].parameters()}
        tensors: list[Tensor] = [*self.parameters(), *self.buffers()]
        frozen = [t for t in tensors if t.requires_grad and t.is_leaf and id(t) not in own]
        others = (slot.seed for i, slot in enumerate(self._slots) if i not in learning)
        settled = [self.model, *(seed for seed in others if seed is not None)]
        on = self._overridden(1.0, learning, seed_pass=True)
        with randomness_kept(self, stream=stream):
            try:
                for tensor in frozen:
                    tensor.requires_grad_(False)
                with state_kept(*settled), on:
                    yield
            finally:
                for tensor in frozen:
                    tensor.requires_grad_(True)

    @contextmanager
    def trying(self, index: int, seed: Seed, stream: int | None = None) -> Iterator[None]:
        """Inside, this seed is fully on in a slot that is free."""
        slot, place = self._slots[index], self.slot_places[index]
        try:
            slot.seed = seed.train(self.training)
            slot.switch(1.0)
            set_tap(place.module, slot, place.part, on=True)
            with randomness_kept(self, stream=stream):
                yield
        finally:
            slot.seed = None
            slot.switch(0.0)
            set_tap(place.module, slot, place.part, on=False)

    def isolated_on(self) -> AbstractContextManager[None]:
        """Inside, TRAINING seeds are fully on, as in their own pass."""
        return self._overridden(1.0, self._training_slots())

    def without(self, *names: str) -> AbstractContextManager[None]:
        """Inside, the seeds of these slots are off: the counterfactual that attribution needs."""
        return self._overridden(0.0, [self.catalogue.slots.index(name) for name in names])

    def committed(self) -> AbstractContextManager[None]:
        """Inside, only fossilized seeds are on: the network that export gives."""
        others = ~self.lifecycle.at(SeedStage.FOSSILIZED)[0]
        return self._overridden(0.0, others.nonzero()[:, 0].tolist())

    def _training_slots(self) -> list[int]:
        return self.lifecycle.at(SeedStage.TRAINING)[0].nonzero()[:, 0].tolist()

    @contextmanager
    def _overridden(
        self, alpha: float, slots: Sequence[int], seed_pass: bool = False
    ) -> Iterator[None]:
        """Inside, these slots run at this alpha."""
        outer = self._overrides, self._in_seed_pass
        try:
            self._overrides = self._overrides | dict.fromkeys(slots, alpha)
            self._in_seed_pass |= seed_pass
            self._set_modes()
            yield
        finally:
            self._overrides, self._in_seed_pass = outer
            self._set_modes()

    def _set_modes(self) -> None:
        """Bring every slot's mode, alpha and hook in line with the arrays and the overrides."""
        training = self._training_slots()
        self._any_training = bool(training)  # asked in every step
        straight_through = self.isolation is Isolation.STRAIGHT_THROUGH
        for index, (slot, place) in enumerate(zip(self._slots, self.slot_places, strict=True)):
            own = index not in self._overrides
            alpha = float(self.lifecycle.alpha[0, index]) if own else self._overrides[index]
            slot.switch(alpha, straight=own and index in training and straight_through)
            set_tap(place.module, slot, place.part, on=slot.mode is not Mode.OFF)

    # --- growing -------------------------------------------------------------------------

    @property
    def situation(self) -> Situation:
        return Situation(self.lifecycle, self.catalogue, self.rules, self.budget)

    @property
    def seed_slots(self) -> Mapping[str, SlotView]:
        return {spec.name: SlotView(self, index) for index, spec in enumerate(self.specs)}

    def legal(self) -> Legality:
        return legality(self.situation, self.space)

    def explain(
        self,
        op: LifecycleOp,
        slot: str,
        *,
        blueprint: str | None = None,
        blend: Blend | str | None = None,
    ) -> list[str]:
        """Why this op would be refused now; empty when it is legal."""
        index = self.catalogue.slots.index(slot)
        plan = None if blueprint is None else self.catalogue.index(blueprint)
        way = None if blend is None else Blend.named(blend)
        return explain(self.situation, 0, op, index, blueprint=plan, blend=way)

    @overload
    def apply(self, fn: Actions) -> Transitions: ...
    @overload
    def apply(self, fn: Callable[[nn.Module], object]) -> Self: ...
    def apply(self, fn: Actions | Callable[[nn.Module], object]) -> Transitions | Self:
        """Carry out one decision, or raise with the reason and change nothing.

        Given a function instead, do what every `nn.Module` does: call it on all submodules.
        """
        if not isinstance(fn, Actions):
            return super().apply(cast("Callable[[nn.Module], None]", fn))
        return self._become(*decide(self.situation, fn))

    def pass_time(self) -> Transitions:
        """An epoch has ended: move alphas and counters, and check the optimisers."""
        for optimizer in self.optimizers:
            surgery.require_same_parameters(optimizer, self)
        return self._become(*pass_time(self.situation))

    def remove_now(self, *names: str) -> Transitions:
        """Take seeds out at once, without the ramp. For emergencies."""
        where = torch.zeros(self.lifecycle.shape, dtype=torch.bool)
        for name in names:
            where[0, self.catalogue.slots.index(name)] = True
        return self._become(*remove_now(self.situation, where))

    def germinate(self, slot: str, blueprint: str, blend: Blend | str = Blend.RAMP) -> Transitions:
        """Plant a seed; it starts to learn at once."""
        index = self.catalogue.index(blueprint)
        return self._act(LifecycleOp.GERMINATE, slot, blueprint=index, blend=Blend.named(blend))

    def advance(self, slot: str) -> Transitions:
        """Start blending the seed in."""
        return self._act(LifecycleOp.ADVANCE, slot)

    def fossilize(self, slot: str) -> Transitions:
        """Make the seed a permanent part of the host."""
        return self._act(LifecycleOp.FOSSILIZE, slot)

    def prune(self, slot: str) -> Transitions:
        """Take the seed out again, through a ramp if it was blended."""
        return self._act(LifecycleOp.PRUNE, slot)

    def _act(self, op: LifecycleOp, slot: str, **choices: int) -> Transitions:
        index = self.catalogue.slots.index(slot)
        return self.apply(Actions.of(self.space, op=int(op), slot=index, **choices))

    def _become(self, life: Lifecycle, record: Transitions) -> Transitions:
        """Adopt new arrays, planting and removing modules so that the body matches them."""
        for index, slot in enumerate(self._slots):
            wanted = int(life.blueprint[0, index])
            if wanted != NOTHING and slot.seed is None:
                self._plant(index, slot, wanted, Blend(int(life.blend[0, index])))
            elif wanted == NOTHING and slot.seed is not None:
                leaving = dict(slot.named_parameters(f"slots.{index}"))
                for optimizer in self.optimizers:
                    surgery.remove_parameters(optimizer, leaving)
                slot.seed = None
        for optimizer in self.optimizers:
            surgery.arrange_parameters(optimizer, list(self.slots.parameters()))
        self.lifecycle = life
        self._set_modes()
        return record

    def _plant(self, index: int, slot: Slot, blueprint: int, blend: Blend) -> None:
        self._planted += 1
        seed = self._built(index, blueprint, blend, "seed", self._planted)
        for optimizer in self.optimizers:
            _let_join(optimizer, index, seed)
        slot.seed = seed

    def shadow_seed(self, index: int, blueprint: int) -> Seed:
        """A newborn that is not planted, the same whenever it is asked for."""
        return self._built(index, blueprint, Blend.RAMP, "shadow", self.catalogue.names[blueprint])

    def _built(
        self, index: int, blueprint: int, blend: Blend, kind: str, number: int | str
    ) -> Seed:
        spec, module = self.specs[index], self.slot_places[index].module
        weights = [*module.parameters(), *self.model.parameters()]
        like = next((p for p in weights if p.is_floating_point()), torch.zeros(()))
        plan = find_blueprint(self.catalogue.names[blueprint], spec.family)
        drawn = derive_seed(self.seed, kind, spec.name, number)
        return build_seed(plan, spec, blend, drawn).to(like).train(self.training)

    # --- measuring and keeping -----------------------------------------------------------

    def measure(
        self,
        *,
        contribution: Mapping[str, float] | None = None,
        gradient: Mapping[str, float] | None = None,
        loss_rise: float | None = None,
    ) -> None:
        """Report what was measured over the last epoch, by slot name; the gates look at it."""
        self.lifecycle = self.lifecycle.measured(
            contribution=None if contribution is None else self._by_slot(contribution),
            gradient=None if gradient is None else self._by_slot(gradient),
            loss_rise=None if loss_rise is None else torch.tensor([loss_rise]),
        )

    def _by_slot(self, values: Mapping[str, float]) -> Tensor:
        row = torch.full((1, len(self.specs)), torch.nan, dtype=torch.float64)
        for name, value in values.items():
            row[0, self.catalogue.slots.index(name)] = value
        return row

    def track(self, optimizer: Optimizer) -> None:
        """Keep this optimiser's parameters equal to the model's; track before making schedulers."""
        if optimizer in self.optimizers:
            return
        surgery.require_same_parameters(optimizer, self)
        surgery.prepare_groups(optimizer, (1.0, GATE_LEARNING_RATE_SCALE))
        self.optimizers.append(optimizer)

    def _let_seeds_join(self, optimizer: Optimizer) -> None:
        """Give the seeds that exist to an optimiser that was made from the model alone."""
        surgery.prepare_groups(optimizer, (1.0, GATE_LEARNING_RATE_SCALE))
        for index, slot in enumerate(self._slots):
            if slot.seed is not None:
                _let_join(optimizer, index, slot.seed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._bond.tie()  # a copy of the whole host

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Everything: the model, what has grown, and how far it has come."""
        with self._bond.reading_all():
            return super().state_dict(*args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Beside the weights: lifecycle arrays, blueprint names and stream counters."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, array in self.lifecycle.state_dict().items():
            destination[f"{prefix}{_LIFECYCLE_PREFIX}{name}"] = array
        destination[f"{prefix}{_NAMES_KEY}"] = self.catalogue.encoded_names()
        destination[f"{prefix}{_COUNTERS_KEY}"] = torch.tensor([self._planted, self._seed_passes])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Rebuild the seeds that were saved; their weights are loaded after this."""
        start = f"{prefix}{_LIFECYCLE_PREFIX}"
        arrays = {
            name.removeprefix(start): state_dict.pop(name).cpu()
            for name in list(state_dict)
            if name.startswith(start)
        }
        if not arrays:
            raise AgreementError(
                "This is not the state of a model with slots",
                given=f"no {start}* among its {len(state_dict)} entries",
                valid="what host.state_dict() gave",
                fix="load the state of the plain model with host.model.load_state_dict(state)",
            )
        life = Lifecycle.from_state_dict(arrays)
        for key in (_NAMES_KEY, _COUNTERS_KEY):
            require_agreement(
                f"whether {key!r} is saved", ("host", True), ("state", prefix + key in state_dict)
            )
        names, counters = (state_dict.pop(prefix + key) for key in (_NAMES_KEY, _COUNTERS_KEY))
        require_agreement("(hosts, slots)", ("host", self.lifecycle.shape), ("state", life.shape))
        life = replace(life, blueprint=self.catalogue.translated(life.blueprint, names))
        # Every seed is built anew, since the saved one may be of another blueprint.
        self._become(Lifecycle.dormant(*self.lifecycle.shape), Transitions.none())
        self._become(life, Transitions.none())
        self._planted, self._seed_passes = (int(count) for count in counters)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over a saved state, whatever grew meanwhile on either side; all of it or nothing."""
        before = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in self.state_dict().items()
        }
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except Exception as error:  # whatever it was, it is raised again below
            super().load_state_dict(before)
            if not isinstance(error, RuntimeError):
                raise
            lines = [line.strip() for line in str(error).splitlines()[1:3]]  # torch's own
            raise AgreementError(
                "The state is of another model, or not all of it",
                given=" ".join(lines) or str(error),
                fix="build the model and wrap it as it was when the state was saved",
            ) from error


def past_results(model: nn.Module) -> dict[int, Any]:
    """For `deepcopy`: results of past forwards that a model kept, which it cannot copy with their
    history, without it. (Torch's older `weight_norm` keeps the weight that it computed.)
    """
    leaves = (leaf for module in model.modules() for leaf in tree_leaves(vars(module)))
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    return {id(result): result.detach().clone() for result in results}


def catalogue_of(
    model: nn.Module, places: Sequence[Place], blueprints: Sequence[str] | None
) -> BlueprintCatalogue:
    """What can be planted at places of a model. Esper's own hosts offer what populations plant."""
    specs = [slot_place.spec for slot_place in places]
    model_params = sum(parameter.numel() for parameter in model.parameters())
    is_wrapped = not isinstance(model, SegmentedHost)
    return build_catalogue(specs, model_params, blueprints, wrapped=is_wrapped)


def _let_join(optimizer: Optimizer, index: int, seed: Seed) -> None:
    prefix = f"slots.{index}.seed"
    named = dict(seed.named_parameters(prefix))
    surgery.add_parameters(optimizer, named, learning_rate_scales(seed, prefix))
