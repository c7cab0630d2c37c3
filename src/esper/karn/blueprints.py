"""The blueprint table of a host, for the terminal."""

from rich import box
from rich.console import Console
from rich.table import Table

from esper.kasmina.blueprints import build_catalogue, find_blueprint
from esper.kasmina.hosts import build_host
from esper.leyline.catalogue import NOT_APPLICABLE


def show_blueprints(host_name: str) -> None:
    host = build_host(host_name)
    specs = host.slot_specs()
    catalogue = build_catalogue(specs, sum(p.numel() for p in host.parameters()))
    title = f"{host_name}: {catalogue.host_params:,} parameters; a seed adds, by slot"
    table = Table(title=title, box=box.SIMPLE)
    table.add_column("blueprint", style="bold", no_wrap=True)
    for spec in specs:
        heading = f"{spec.name}\n{spec.channels} channels"
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what it is")
    for index, name in enumerate(catalogue.names):
        costs = [row[index] for row in catalogue.costs]
        cells = [
            "-" if cost == NOT_APPLICABLE else f"{cost:,} ({cost / catalogue.host_params:.0%})"
            for cost in costs
        ]
        table.add_row(name, *cells, find_blueprint(name, specs[0].family).summary)
    Console().print(table)
