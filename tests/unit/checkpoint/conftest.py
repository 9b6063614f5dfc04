"""The saved state that most tests of a checkpoint's directory begin with."""

from pathlib import Path

import pytest

from fsharding import checkpoint as ck
from tests.checkpoints import planned, state_of


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ck.save(tmp_path / "12", state_of(planned()), extra={"seed": 1})
    return tmp_path / "12"
