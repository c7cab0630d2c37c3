"""chip: a population in which one block of threads trains one whole host.

`tape` turns hosts and blueprints into lists of layer operations, `source` writes them as device
source, `build` compiles it, `launch` runs it over the rows of a population. `DESIGN.md` beside them
says how a block's memory is used and how a step is computed.
"""
