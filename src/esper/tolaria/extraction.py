"""Takes one environment out of a population, as a model of its own."""

import torch

from esper.kasmina.slotted import SlottedModel
from esper.leyline import NOTHING, UnknownNameError
from esper.tolaria.plan import HOST
from esper.tolaria.population import Population


def extract(population: Population, environment: int) -> SlottedModel:
    """The environment's host with its seeds, in the stage they are in, independent from now on."""
    if not 0 <= environment < len(population):
        raise UnknownNameError(
            "There is no such environment", given=environment, valid=f"0 to {len(population) - 1}"
        )
    config = population.config
    host = SlottedModel(
        population.build_host().to(population.device, config.dtype),
        isolation=config.isolation,
        rules=config.rules,
        budget=config.budget,
        blueprints=config.blueprints,
    )
    life = population.lifecycle.rows(torch.tensor([environment]))
    state = {f"lifecycle.{name}": array for name, array in life.state_dict().items()}
    state["blueprint_names"] = population.catalogue.encoded_names()
    state["counters"] = torch.tensor([int(population.planted[environment]), 0])

    own = torch.zeros(population.lifecycle.shape, dtype=torch.bool)
    own[environment] = life.blueprint[0] != NOTHING
    homes = {HOST: (environment, "model.")}  # row and prefix of its names
    for key, _, rows in population.places(own):
        part = "body" if key[0] == "seed" else "gate"
        homes[key] = (int(rows), f"slots.{key[1]}.seed.{part}.")
    for key, (row, prefix) in homes.items():
        values = population.pools[key].state.theta[row : row + 1]
        for name, value in population.engine.templates[key].views(values).items():
            state[f"{prefix}{name}"] = value[0].clone()
    host.load_state_dict(state)
    return host
