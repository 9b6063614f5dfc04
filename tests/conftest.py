"""Hypothesis profiles: `ci` repeats itself exactly and is the default; HYPOTHESIS_PROFILE=full looks ten times longer."""

import os

import pytest
import torch
import torch._dynamo  # the fork server has what is imported here; ranks would each take seconds for it
from hypothesis import settings

from tests.full_only import FULL_ONLY

# As the ranks have: on shared cores, threads of tiny operations wait for each other ten times longer than they work.
torch.set_num_threads(1)

settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what stands in FULL_ONLY; a line that fits no test of a collected file is an error."""
    files = {item.nodeid.partition("::")[0].removeprefix("tests/") for item in items}
    left = {line for line in FULL_ONLY if line.partition("::")[0] in files}
    for item in items:
        line = item.nodeid.removeprefix("tests/")
        if line in FULL_ONLY:
            item.add_marker(pytest.mark.full)
            left.discard(line)
    whole_files = not config.getoption("keyword") and not any("::" in argument for argument in config.args)
    assert not (whole_files and left), f"tests/full_only.py names tests that are not there: {sorted(left)}"
