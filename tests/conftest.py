"""Hypothesis profiles: `ci` repeats itself exactly and is the default; `quick` looks a fifth as long, `full` ten times."""

import os

import torch
import torch._dynamo  # the fork server has what is imported here; ranks would each take seconds for it
from hypothesis import settings

# As the ranks have: on shared cores, threads of tiny operations wait for each other ten times longer than they work.
torch.set_num_threads(1)

settings.register_profile("quick", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
