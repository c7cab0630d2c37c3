"""Settings for every test: one thread, and no per-example deadline on shared machines."""

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("esper", deadline=None, print_blob=True)
hypothesis.settings.load_profile("esper")
