"""What is installed, what there is to train on, and whether training works here."""

import os
import platform
import shutil
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper import __version__
from esper.archive import scratch_folder, write_whole
from esper.karn.commands import Doctor
from esper.karn.train_commands import train_launched
from esper.leyline.errors import EsperError
from esper.simic.training import PRESETS, EvaluationConfig, RunFolder, to_toml
from esper.simic.training.run_processes import launch
from esper.tolaria.tasks import find_task, task_names

NEEDED = ("torch", "numpy", "safetensors", "tyro", "rich")
EXTRAS = {
    "gymnasium": "gym",
    "matplotlib": "report",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow-skinny": "mlflow",
    "onnx": "export",
    "lightning": "lightning",
    "transformers": "transformers",
}


def examine(_: Doctor) -> None:
    """Print everything; exit code 1 if training does not work."""
    console = Console()
    table = Table(box=None, show_header=False)
    table.add_row("esper", __version__)
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in (*NEEDED, *EXTRAS):
        try:
            table.add_row(name, version(name))
        except PackageNotFoundError:
            extra = EXTRAS.get(name)
            fix = f"pip install 'esper-ml[{extra}]'" if extra else "missing: install esper anew"
            table.add_row(name, escape(f"not installed ({fix})"))
    threads = os.environ.get("OMP_NUM_THREADS")
    table.add_row("cores", f"{os.cpu_count()}, OMP_NUM_THREADS {threads or 'not set'}")
    gpu = "none that torch can use"
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    table.add_row("GPU", gpu)
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    table.add_row("free disk", f"{free:,.0f} GB")
    console.print(table)
    console.print("\n[bold]Data[/bold]")
    for name in task_names():
        try:
            found = f"{find_task(name).load(0).train.samples:,} samples to train on"
        except EsperError as error:
            found = f"[yellow]not found[/yellow]: {escape(str(error))}"
        console.print(f"  {name}: {found}")
    console.print("\n[bold]A small training run[/bold]")
    if not _self_check(console):
        raise SystemExit(1)


def _self_check(console: Console) -> bool:
    """Train a tiny run, then go on with it; on two cores in two processes."""
    config = replace(
        PRESETS["demo"],
        rounds=1,
        envs=4,
        cases=1,
        horizon=6,
        processes=min(2, os.cpu_count() or 1),
        ppo=replace(PRESETS["demo"].ppo, minibatches=1),
        evaluation=EvaluationConfig(every=2, seeds=1, baselines=()),
    )
    began = time.monotonic()
    try:
        with scratch_folder() as folder:
            run = RunFolder.create(folder / "run", config, {})
            for rounds in (1, 2):
                write_whole(run.path / run.kind, to_toml(replace(config, rounds=rounds)))
                launch(train_launched, run.path, True, None, sizes=config.sizes)
            works = run.rounds()[-1] == 2
    except EsperError as error:
        console.print(f"  [red]failed[/red]: {escape(str(error))}")
        return False
    word = "[green]works[/green]" if works else "[red]did not finish[/red]"
    what = f"trained and resumed in {config.processes} process(es)"
    console.print(f"  {word}: {what}, {time.monotonic() - began:.0f} s")
    return works
