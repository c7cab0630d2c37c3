"""A seed's whole life on a real host, told in the terminal."""

import copy

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

from esper.karn.commands import Life
from esper.kasmina import SlottedModel, build_host, export_module
from esper.leyline import EsperError, LifecycleOp, SeedStage, Transitions
from esper.leyline.streams import derive_seed
from esper.show.palette import STAGE_COLOURS
from esper.tolaria.data.splits import Splits
from esper.tolaria.reference import accuracy, contributions, shuffled_batches, train_epoch
from esper.tolaria.tasks import mnist1d

MIN_EPOCHS = 16
BATCH = 50
LEARNING_RATE = 3e-3
GROWN, TRIED = "early", "late"  # the slot that keeps its seed, and the one that loses it again


class LivingNetwork:
    """One network in training."""

    def __init__(self, model: torch.nn.Module, data: Splits, seed: int) -> None:
        self.host = SlottedModel(model, seed=seed)
        self.data = data
        self.optimizer = torch.optim.Adam(self.host.parameters(), lr=LEARNING_RATE)
        self.host.track(self.optimizer)
        self.order = torch.Generator().manual_seed(derive_seed(seed, "order"))
        self.loss = float("nan")
        self.score = float("nan")

    def epoch(self) -> Transitions:
        """Train, validate, measure every seed's contribution, and let time pass."""
        batches = shuffled_batches(*self.data.train, BATCH, self.order)
        report = train_epoch(self.host, self.optimizer, cross_entropy, batches)
        before, self.loss = self.loss, report.loss
        self.score = self.validation_score()
        self.host.measure(
            contribution=contributions(self.host, self.validation_score),
            gradient=report.gradient,
            loss_rise=self.loss / before - 1.0,
        )
        return self.host.pass_time()

    def validation_score(self) -> float:
        return accuracy(self.host, *self.data.validation)


def tell_life(command: Life) -> None:
    """Two networks with the same start and the same data: one grows, one never does."""
    epochs, seed, samples = command.epochs, command.seed, command.samples
    if epochs < MIN_EPOCHS or samples < BATCH:
        raise EsperError(
            "The story is too short for a whole life",
            given=f"{epochs} epochs, {samples} samples",
            valid=f"at least {MIN_EPOCHS} epochs and {BATCH} samples",
        )
    torch.set_num_threads(1)  # tiny operations are slower with more
    console = Console(highlight=False)
    console.print(
        "[bold]A seed's whole life.[/] A 1-D convolutional host of 1,114 parameters learns "
        "MNIST-1D;\na script (the learned controller comes later) plants a seed in slot "
        f"'{GROWN}' and tries another in '{TRIED}'.\n"
    )
    data = mnist1d(seed, samples)
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "host"))
        model = build_host("conv1d")
    growing, plain = (LivingNetwork(each, data, seed) for each in (model, copy.deepcopy(model)))
    console.print(f"epoch  loss  valid  never grown  {GROWN:<25} {TRIED:<25}", style="underline")
    for epoch in range(1, epochs + 1):
        plain.epoch()
        steps = list(growing.epoch()) + list(_decide(growing.host, epoch))
        console.print(
            f"{epoch:>5}  {growing.loss:4.2f}  {growing.score:4.1f}%  {plain.score:10.1f}%  "
            + " ".join(_slot_text(growing.host, name) for name in (GROWN, TRIED)),
            soft_wrap=True,
        )
        for slot, name in enumerate(growing.host.catalogue.slots.names):
            moves = [step for step in steps if step.slot == slot]
            if moves:
                path = " → ".join([moves[0].before.name, *(move.after.name for move in moves)])
                console.print(f"{'':>7}{name}: {path}", style="dim", soft_wrap=True)
    _conclude(console, growing, plain)


def _decide(host: SlottedModel, epoch: int) -> Transitions:
    """The script: decisions by epoch and stage, each legal when it is taken."""
    if epoch == 3:
        return host.germinate(GROWN, "conv", "ramp")
    if epoch == 5:
        return host.advance(GROWN)
    if epoch == 6:
        return host.germinate(TRIED, "attention", "immediate")
    if epoch == 9:
        return host.prune(TRIED)
    if epoch >= 8 and not host.explain(LifecycleOp.FOSSILIZE, GROWN):
        return host.fossilize(GROWN)
    return Transitions.none()


def _slot_text(host: SlottedModel, name: str) -> str:
    slot = host.seed_slots[name]
    text = slot.stage.name
    if slot.seed is not None:
        filled = round(4 * slot.seed.alpha)
        text += f" {'█' * filled}{'░' * (4 - filled)} {slot.seed.blueprint}"
    return f"[{STAGE_COLOURS[slot.stage.name]}]{text:<25}[/]"


def _conclude(console: Console, growing: LivingNetwork, plain: LivingNetwork) -> None:
    host = growing.host
    exported = export_module(host, growing.data.test[0][:8])
    size = sum(parameter.numel() for parameter in exported.parameters())
    table = Table(title="\nOn the test split, which nothing above has seen")
    for column in ("network", "parameters", "accuracy"):
        table.add_column(column, justify="left" if column == "network" else "right")
    before, after = accuracy(plain.host, *plain.data.test), accuracy(exported, *growing.data.test)
    table.add_row("never grown", f"{host.catalogue.host_params:,}", f"{before:.1f} %")
    table.add_row("grown, exported to a plain module", f"{size:,}", f"{after:.1f} %")
    console.print(table)
    stage = host.seed_slots[GROWN].stage
    if stage is SeedStage.FOSSILIZED:
        verdict = (
            f"it changed test accuracy by {after - before:+.1f} points for "
            f"{size - host.catalogue.host_params:,} parameters."
        )
    else:
        verdict = "so the export leaves it out: only what is permanent is kept."
    console.print(
        f"The seed in '{GROWN}' ended {stage.name}; {verdict} "
        f"The one in '{TRIED}' is gone without a trace."
    )
