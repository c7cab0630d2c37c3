"""Runs of grow as facts, made by hand: one seed stays, one is pruned, one is left at the end."""

from esper.show.growth_facts import Part, Report, ShownEpoch, SlotState

PARTS = (
    Part(path="stem", kind="Linear", params=336, depth=0),
    Part(path="body", kind="Sequential", params=272, depth=0, opened=True),
    Part(path="body.act", kind="ReLU", params=0, depth=1, slots=("body.act",)),
    Part(path="body.1 … 4", kind="4 × Block", params=272, depth=1),
    Part(path="head", kind="<Head>", params=34, depth=0, slots=("head",)),
)
Held = tuple[str, str | None, float, float | None]  # stage, blueprint, alpha, contribution


def epoch(number: int, op: str, said: str, slot: str | None, **held: Held) -> ShownEpoch:
    """One epoch; `held` is what the slots hold after it, by name without its path."""
    names = {"act": "body.act", "head": "head"}
    slots = [
        SlotState(
            slot=names[name], stage=stage, blueprint=plan, alpha=alpha, contribution=worth,
            params=33 if plan else 0,
        )
        for name, (stage, plan, alpha, worth) in held.items()
    ]  # fmt: skip
    return ShownEpoch(
        number=number,
        train_loss=1.0 / number,
        val_loss=1.2 / number,
        score=50.0 + 5 * number,
        committed=50.0 + 4 * number,
        added=sum(state.params for state in slots),
        most_added=66,
        op=op,
        decision=said,
        slot=slot,
        changes=[(slot, slots[0].stage, "it pays")] if slot else [],
        slots=slots,
        seconds={"train": 2.0, "measure": 1.0, "decide": 0.5},
        flops=1e9,
    )


EPOCHS = (
    epoch(1, "WAIT", "", None),
    epoch(2, "GERMINATE", "plant norm at body.act (ramp)", "body.act",
          act=("TRAINING", "norm", 0.0, None)),
    epoch(3, "GERMINATE", "plant wide at head (ramp)", "head",
          head=("TRAINING", "wide", 0.0, None), act=("BLENDING", "norm", 0.5, 1.5)),
    epoch(4, "PRUNE", "prune wide at head", "head",
          head=("EMBARGOED", None, 0.0, None), act=("HOLDING", "norm", 1.0, 2.0)),
    epoch(5, "FOSSILIZE", "keep norm at body.act", "body.act",
          act=("FOSSILIZED", "norm", 1.0, 2.5), head=("EMBARGOED", None, 0.0, None)),
    epoch(6, "GERMINATE", "plant mlp at head (ramp)", "head",
          head=("TRAINING", "mlp", 0.0, None), act=("FOSSILIZED", "norm", 1.0, 3.0)),
    epoch(7, "END", "", None,
          act=("FOSSILIZED", "norm", 1.0, 3.25), head=("EMBARGOED", None, 0.0, None)),
)  # fmt: skip


def growth_facts(epochs: int = len(EPOCHS)) -> Report:
    """After so many of its seven epochs."""
    return Report(
        name="my<run>",
        model="Net",
        settings={"device": "cpu", "precision": "full", "lr": 0.01},
        versions={"torch": "2.13"},
        planned=len(EPOCHS),
        metric="accuracy",
        before={"loss": 1.4, "score": 48.0},
        after={"loss": 0.2, "score": 78.0} if epochs == len(EPOCHS) else {},
        host_params=642,
        room=100,
        places=("body.act", "head"),
        parts=PARTS,
        epochs=EPOCHS[:epochs],
    )
