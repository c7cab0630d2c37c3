"""A seed's whole life on a real host, told in the terminal."""

import torch
from rich.console import Console

from esper.garden import Case, Context, Episodes, Source
from esper.karn.commands import Life
from esper.kasmina import export_module
from esper.leyline import Actions, Blend, EsperError, LifecycleOp, SeedStage
from esper.show.palette import STAGE_COLOURS
from esper.show.terminal import show_table
from esper.tolaria.population import extract

MIN_EPOCHS, MIN_SAMPLES = 16, 50
GROWN, TRIED = "early", "late"  # the slot that keeps its seed, and the one that loses it again
GROWS, PLAIN = 0, 1  # rows
FIRST, SECOND = (GROWN, "conv", Blend.RAMP), (TRIED, "attention", Blend.IMMEDIATE)
SCRIPT = {  # what is decided before an epoch, and of which seed
    4: (LifecycleOp.GERMINATE, FIRST),
    6: (LifecycleOp.ADVANCE, FIRST),
    7: (LifecycleOp.GERMINATE, SECOND),
    10: (LifecycleOp.PRUNE, SECOND),
}


def tell_life(command: Life) -> None:
    """Two networks with the same start and the same data: one grows, one never does."""
    epochs, samples = command.epochs, command.samples
    if epochs < MIN_EPOCHS or samples < MIN_SAMPLES:
        raise EsperError(
            "The story is too short for a whole life",
            given=f"{epochs} epochs, {samples} samples",
            valid=f"at least {MIN_EPOCHS} epochs and {MIN_SAMPLES} samples",
        )
    torch.set_num_threads(1)  # tiny operations are slower with more
    console = Console(highlight=False)
    console.print(
        "[bold]A seed's whole life.[/] A 1-D convolutional host of 1,114 parameters learns "
        "MNIST-1D;\na script (the learned controller comes later) plants a seed in slot "
        f"'{GROWN}' and tries another in '{TRIED}'.\n"
    )
    source = Source(family="mnist1d", samples=samples)
    context = Context(name="life", family="mnist1d", source=source)
    two = Episodes([context], 2, horizon=epochs, test=True)
    two.begin(torch.arange(2), [Case(context, command.seed)] * 2)
    console.print(f"epoch  loss  valid  never grown  {GROWN:<25} {TRIED:<25}", style="underline")
    for epoch in range(1, epochs + 1):
        done = two.advance(_decided(two, epoch))
        loss, scores = float(two.signals().latest("train_loss")[GROWS]), done.accuracy.tolist()
        console.print(
            f"{epoch:>5}  {loss:4.2f}  {scores[GROWS]:4.1f}%  {scores[PLAIN]:10.1f}%  "
            + " ".join(_slot_text(two, name) for name in (GROWN, TRIED)),
            soft_wrap=True,
        )
        for slot, name in enumerate(two.population.catalogue.slots.names):
            moves = [move for move in done.transitions if move.slot == slot]
            if moves:
                path = " → ".join([moves[0].before.name, *(move.after.name for move in moves)])
                console.print(f"{'':>7}{name}: {path}", style="dim", soft_wrap=True)
    _conclude(console, two, source)


def _decided(two: Episodes, epoch: int) -> Actions:
    """The script: what is decided before an epoch, each legal when it is."""
    catalogue, space = two.population.catalogue, two.population.space
    ripe = two.legal().masks["slot"][GROWS, LifecycleOp.FOSSILIZE, catalogue.slots.index(GROWN)]
    late = LifecycleOp.FOSSILIZE if epoch > 8 and bool(ripe) else LifecycleOp.WAIT
    op, (slot, blueprint, blend) = SCRIPT.get(epoch, (late, FIRST))
    chosen = {"slot": catalogue.slots.index(slot), "blueprint": catalogue.names.index(blueprint)}
    both = Actions.of(space, 2, op=torch.tensor([op, LifecycleOp.WAIT]), blend=blend, **chosen)
    return both.canonical()


def _slot_text(two: Episodes, name: str) -> str:
    catalogue, life = two.population.catalogue, two.population.lifecycle
    place = GROWS, catalogue.slots.index(name)
    text = stage = SeedStage(int(life.stage[place])).name
    if bool(life.occupied[place]):
        filled = round(4 * float(life.alpha[place]))
        text += f" {'█' * filled}{'░' * (4 - filled)} {catalogue.names[int(life.blueprint[place])]}"
    return f"[{STAGE_COLOURS[stage]}]{text:<25}[/]"


def _conclude(console: Console, two: Episodes, source: Source) -> None:
    exported = export_module(extract(two.population, GROWS), source.load().test.inputs[:8])
    size = sum(parameter.numel() for parameter in exported.parameters())
    host = two.population.catalogue.host_params
    after, before = two.ledger.test[:, -1].tolist()
    rows = [("never grown", f"{host:,}", f"{before:.1f} %")]
    rows.append(("grown, exported to a plain module", f"{size:,}", f"{after:.1f} %"))
    columns, title = ("network", "parameters", "accuracy"), "\nOn the test split, unseen so far"
    show_table(columns, rows, title=title, right=columns[1:])
    slot = two.population.catalogue.slots.index(GROWN)
    stage = SeedStage(int(two.population.lifecycle.stage[GROWS, slot]))
    verdict = "so the export leaves it out: only what is permanent is kept."
    if stage is SeedStage.FOSSILIZED:
        gain = f"{after - before:+.1f} points for {size - host:,} parameters"
        verdict = f"it changed test accuracy by {gain}."
    console.print(
        f"The seed in '{GROWN}' ended {stage.name}; {verdict} "
        f"The one in '{TRIED}' is gone without a trace."
    )
