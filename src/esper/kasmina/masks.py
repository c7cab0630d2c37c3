"""From gates to masks and reasons: what is open, and why the rest is not."""

from collections.abc import Sequence

import torch

from esper.kasmina.gates import OP_GATES, Situation
from esper.leyline.errors import GateRefusedError, UnknownNameError
from esper.leyline.heads import HEADS, ActionSpace
from esper.leyline.legality import Actions, Legality
from esper.leyline.ops import Blend, LifecycleOp

# N hosts, O ops, S slots, P blueprints, K blends


def legality(situation: Situation, space: ActionSpace | None = None) -> Legality:
    """Masks for every head, from the gates."""
    space = space or HEADS.resolve(situation.catalogue)
    hosts, slots = situation.life.shape
    by_op = torch.zeros(hosts, len(LifecycleOp), slots, dtype=torch.bool)  # [N, O, S]
    for op, gate in OP_GATES.items():
        by_op[:, op] = gate.accepts(situation)
    ops = by_op.any(dim=2)
    ops[:, LifecycleOp.WAIT] = True
    blends = situation.affordable()  # [N, S, P, K]
    masks = {"op": ops, "slot": by_op, "blueprint": blends.any(dim=3), "blend": blends}
    return Legality(space, hosts, masks)


def explain(
    situation: Situation,
    host: int,
    op: LifecycleOp,
    slot: int,
    *,
    blueprint: int | None = None,
    blend: int | None = None,
) -> list[str]:
    """Why this op is refused for one host and slot; empty when it is legal."""
    if op not in list(LifecycleOp):
        raise UnknownNameError.of("op", str(op), [each.name for each in LifecycleOp])
    op = LifecycleOp(op)
    if op is LifecycleOp.WAIT:
        return []
    reasons = OP_GATES[op].refusals(situation, host, slot)
    if reasons or op is not LifecycleOp.GERMINATE or blueprint is None:
        return reasons
    name = situation.catalogue.names[blueprint]
    costs = situation.catalogue.total_costs()[slot, blueprint]  # [K]
    cost = int(costs.min() if blend is None else costs[blend])
    if cost < 0:
        return [f"blueprint {name!r} does not fit slot {situation.catalogue.slots.names[slot]!r}"]
    room = int(situation.room()[host])
    if cost > room:
        how = "" if blend is None else f" with blend {Blend(blend).name}"
        return [f"{name!r}{how} costs {cost} parameters, the budget has room for {room}"]
    return []


def require_legal(situation: Situation, actions: Actions, legal: Legality) -> None:
    """Raise with the reason of the first host whose action is refused."""
    refused = ~legal.permits(actions)
    if not bool(refused.any()):
        return
    host = int(refused.nonzero()[0, 0])
    op, slot = LifecycleOp(int(actions["op"][host])), int(actions["slot"][host])
    reasons: Sequence[str] = explain(
        situation,
        host,
        op,
        slot,
        blueprint=int(actions["blueprint"][host]),
        blend=int(actions["blend"][host]),
    )
    open_ops = [o.name for o in LifecycleOp if bool(legal.masks["op"][host, o])]
    raise GateRefusedError(
        f"{op.name} of slot {situation.catalogue.slots.names[slot]!r} in host {host} is refused",
        given="; ".join(reasons) or "the action is masked",
        valid=f"in this host now: {', '.join(open_ops)}",
    )
