"""Shadows: seeds that learn beside the hosts of a population without being planted.

Each has a row of parameters and optimiser state of its own, in pools of their own. It learns in a
pass `h + g(h)` that branches off its host at its slot, with the host's weights and planted seeds
held fixed. Hosts are only read: they are what they would be without shadows, to the bit.

Shapes: `N` environments, `S` slots, `P` blueprints, `B` batch, `U` shadows of a pass, `M` their
hosts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.leyline import AgreementError, Blend
from esper.leyline.shadows import AuditionPlan, ShadowReadings
from esper.tolaria.engine import as_inputs, cast_weights, losses_of, sample_losses
from esper.tolaria.plan import HOST, PassRows, PoolKey, sent_to
from esper.tolaria.pools import VACANT, Pool, take_back
from esper.tolaria.random_streams import fold

if TYPE_CHECKING:
    from esper.tolaria.population import Population


def _each(where: Tensor) -> Iterator[tuple[PoolKey, Tensor]]:
    """Pool by pool: the environments that have a shadow of `where` [N, S, P] there."""
    for slot, kind in where.any(dim=0).nonzero().tolist():
        yield ("shadow", slot, kind), where[:, slot, kind].nonzero()[:, 0]


def shadow_places(
    rows: Tensor, where: Tensor | None = None
) -> Iterator[tuple[PoolKey, Tensor, Tensor]]:
    """Pool by pool, of rows [N, S, P]: the environments of shadows, and their rows."""
    for key, owners in _each(rows != VACANT if where is None else where):
        yield key, owners, rows[owners, key[1], key[2]]


class ShadowRows:
    """All shadows of a population: where they live, and what they have shown."""

    def __init__(self, population: "Population") -> None:
        self.population, self.names = population, population.catalogue.names
        self.fits, hosts = torch.tensor(population.catalogue.costs) >= 0, len(population)  # [S, P]
        self.rows = torch.full((hosts, *self.fits.shape), VACANT)  # [N, S, P]
        self.pools: dict[PoolKey, Pool] = {}
        # What a shadow costs is not known here; see `tolaria/flops.py`.
        unknown = torch.full(self.fits.shape, torch.nan)
        self._nothing = self.readings = ShadowReadings.none(hosts, unknown)

    @property
    def living(self) -> Tensor:
        """[N, S, P] bool."""
        return self.rows != VACANT

    def require_fitting(self, plan: AuditionPlan) -> None:
        """Refuse a plan that is not for this population."""
        shapes, valid = [list(each.shape) for each in plan], list(self.rows.shape)
        fitting = plan.where.dtype == torch.bool and shapes == [valid, valid[:1]]
        if not fitting or not bool(((plan.share >= 0) & (plan.share <= 1)).all()):
            raise AgreementError(
                "An audition needs a boolean for each shadow and a share for each environment",
                given=f"{plan.where.dtype} {shapes[0]}, shares {plan.share.tolist()[:8]}",
                valid=f"torch.bool {valid}, {valid[0]} shares from 0 to 1",
            )
        for _, slot, kind in (plan.where & ~self.fits).nonzero()[:1].tolist():
            fit = [n for n, fits in zip(self.names, self.fits[slot], strict=True) if fits]
            raise AgreementError(f"{self.names[kind]!r} does not fit slot {slot}", valid=fit)

    def arrange(self, where: Tensor) -> None:
        """Let the shadows in `where` [N, S, P] live, and no others."""
        seeds, epoch = self.population.seeds, self.population.lifecycle.epoch
        self.give_up(~where)
        born = where & ~self.living
        births = []
        for key, owners in _each(born):
            _, slot, kind = key
            streams = fold(seeds[owners], "shadow", slot, self.names[kind], epoch[owners])
            births.append((key, owners, streams))
        self.population.newborn(*births)
        self._forget(born)

    def _forget(self, where: Tensor) -> None:
        """What was shown here, [N, S, P] or [N, 1, 1], was shown by others."""
        if bool(where.any()):
            blank, now = self._nothing.arrays(), self.readings.arrays()
            kept = {name: torch.where(where, blank[name], now[name]) for name in now}
            self.readings = ShadowReadings(**kept)

    def give_up(self, where: Tensor) -> None:
        """End the shadows in `where` [N, S, P]. What they have shown stays known."""
        gone = where & self.living
        take_back([(self.pools[key], rows) for key, _, rows in shadow_places(self.rows, gone)])
        self.rows[gone] = VACANT

    def become_seeds(self, came: Tensor) -> None:
        """Newborn seeds that `came` [N, S] take over what shadows of their kind have learned.

        Not with the immediate blend, which must be nothing at first. Nothing is left of the slot's
        shadows.
        """
        if not self.pools:
            return
        hosts, life = self.population, self.population.lifecycle
        own = life.blueprint[:, :, None] == torch.arange(len(self.names))
        warm = (came & (life.blend != Blend.IMMEDIATE))[:, :, None] & own & self.living
        for key, owners in _each(warm):
            _, slot, kind = key
            rows, old = hosts.pool_rows[owners, slot], self.rows[owners, slot, kind]
            hosts.pools["seed", slot, kind].put(rows, self.pools[key].tensors(), old)
        self.give_up(came[:, :, None])

    def restart(self, environments: Tensor) -> None:
        """These environments [K] begin anew: nothing of theirs is left."""
        chosen = torch.zeros(len(self.rows), 1, 1, dtype=torch.bool)
        chosen[environments] = True
        self.give_up(chosen)
        self._forget(chosen)

    def take_over(self, targets: Tensor, readings: ShadowReadings, sources: Tensor) -> None:
        """Of `targets` [K] no shadow is left, and what those of `sources` [K] showed is known."""
        self.restart(targets)
        now = {name: array.clone() for name, array in self.readings.arrays().items()}
        for name, array in readings.arrays().items():
            now[name][targets] = array[sources]
        self.readings = ShadowReadings(**now)


class _Pass:
    """Shadows that learn or are measured together, after their hosts in the rows of a pass."""

    def __init__(self, population: "Population", where: Tensor) -> None:
        shadows, device = population.shadows, population.device
        self.population, self.pools = population, shadows.pools
        slots, kinds, owners = where.permute(1, 2, 0).nonzero().unbind(1)  # as in the plan
        self.places = owners, slots, kinds  # in arrays [N, S, P]
        self.host = owners.unique(return_inverse=True)[1].to(device)  # [U] each one's, of the M
        self.rows = {key: rows for key, _, rows in shadow_places(shadows.rows, where)}
        rows = PassRows.shadows(population.lifecycle, where)
        self.plan = sent_to(population.plan_of(rows), device)
        assert self.plan.environment is not None
        self.environment = self.plan.environment  # [M + U]
        self.held: dict[PoolKey, dict[str, Tensor]] = {}  # what pools keep of them

    def hold(self) -> None:
        """Copy the rows out of their pools: those of others must not move, nor their moments."""
        for key, rows in self.rows.items():
            kept = self.pools[key].tensors()
            self.held[key] = {name: tensor[rows] for name, tensor in kept.items()}

    def put_back(self) -> None:
        for key, rows in self.rows.items():
            self.pools[key].put(rows, self.held[key], slice(None))

    def _outputs(self, own: Mapping[PoolKey, Tensor], inputs: Tensor) -> Tensor:
        """[M + U, B, ...], for inputs of the M hosts."""
        engine, config = self.population.engine, self.population.config
        cast = cast_weights(self.population.pools, config.compute_dtype)
        weights = {key: rows.detach() for key, rows in cast.items()}
        weights |= {key: rows.to(weights[HOST].dtype) for key, rows in own.items()}
        return engine.logits(weights, self.plan, as_inputs(inputs, weights))

    def learn(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """From one batch of every environment, [N, B, ...]; returns the gains [U] before it."""
        leaves = {key: own["theta"].detach().requires_grad_() for key, own in self.held.items()}
        count = self.plan.start
        outputs = self._outputs(leaves, inputs[self.environment[:count]])
        losses = losses_of(outputs, labels[self.environment])
        found = list(torch.autograd.grad(losses[count:].sum(), list(leaves.values())))
        with torch.no_grad():
            squares = [own["squares"] for own in self.held.values()]
            torch._foreach_addcmul_(squares, found, found, 1.0)
            states = [self.pools[key].state_of(own) for key, own in self.held.items()]
            self.population.config.optimiser.step(states, found)
            return losses[:count][self.host].double() - losses[count:].double()

    @torch.no_grad()
    def gains(self) -> tuple[Tensor, Tensor]:
        """On validation data, and their standard errors, [U] each."""
        feed = self.population.feed
        own = {key: tensors["theta"] for key, tensors in self.held.items()}
        sums = torch.zeros(2, len(self.host), device=feed.device, dtype=torch.float64)
        samples, count = 0, self.plan.start
        for inputs, labels in feed.held_out("validation", self.environment):
            losses = sample_losses(self._outputs(own, inputs[:count]), labels).double()
            gains = losses[:count][self.host] - losses[count:]
            sums += torch.stack([gains.sum(1), gains.square().sum(1)])
            samples += gains.shape[1]
        mean, square = sums / samples
        variance = (square - mean.square()).clamp(min=0.0) / max(samples - 1, 1)
        return mean, variance.sqrt()


class ShadowEpoch:
    """An epoch of the shadows in `where` [N, S, P], on so many `batches` [N] of their hosts'."""

    def __init__(self, population: "Population", where: Tensor, batches: Tensor) -> None:
        self.population, self.feed, self.shadows = population, population.feed, population.shadows
        self.where, self.batches = where & (batches > 0)[:, None, None], batches[:, None, None]
        # Of the epoch's batches that each learns from, [N, S, P].
        self.share = self.where * self.batches.double() / self.feed.batches
        self._gains = torch.zeros(where.shape, dtype=torch.float64, device=self.feed.device)
        self._passes: dict[bytes, _Pass] = {}  # by which take part
        self._now: _Pass | None = None
        for pool in self.shadows.pools.values():
            pool.squares.zero_()

    def step(self, number: int, index: Tensor) -> None:
        """Learn from the batch `index` [N, B], the epoch's `number`, before hosts do.

        Those of an environment are spread evenly over the epoch, and the last batch is among them.
        """
        before, after = ((number + i) * self.batches // self.feed.batches for i in (0, 1))
        due = self.where & (after > before)
        if bool(due.any()):
            chosen = self._pass(due)
            self._gains[chosen.places] += chosen.learn(*self.feed.peek(index))

    def _pass(self, where: Tensor) -> _Pass:
        """Those in `where` [N, S, P], with their rows in hand and all others put back."""
        name = where.numpy().tobytes()
        if name not in self._passes:
            self._passes[name] = _Pass(self.population, where)
        chosen = self._passes[name]
        if self._now is not chosen:
            if self._now is not None:
                self._now.put_back()
            chosen.hold()
            self._now = chosen
        return chosen

    def finish(self, host_gradient: Tensor, found: Sequence[Tensor] = ()) -> None:
        """Measure all that have learned; `host_gradient` [N] as `EpochRecord` has it.

        `found`, if it was computed elsewhere, by places [U]: sums over their batches of squared
        gradients and of gains; gain and error on validation data.
        """
        if not bool(self.where.any()):
            return
        places: tuple[Tensor, ...] = self.where.nonzero().unbind(1)
        if not found:
            everyone = self._pass(self.where)  # their rows are in hand, as in their pools
            everyone.put_back()
            held, places = everyone.held.values(), everyone.places
            squares = torch.cat([own["squares"].double().sum(dim=1) for own in held])
            found = (squares, self._gains[places], *everyone.gains())

        def spread(values: Tensor) -> Tensor:
            wide = torch.full(self.where.shape, torch.nan, dtype=torch.float64)
            wide[places] = values.cpu()
            return wide

        squares, train_gain, gain, error = map(spread, found)
        readings = self.shadows.readings
        self.shadows.readings = readings.updated(
            self.where,
            readings.epochs + self.share,
            gain=gain,
            error=error,
            train_gain=train_gain / self.batches,
            gradient=(squares / self.batches).sqrt() / host_gradient[:, None, None],
        )
