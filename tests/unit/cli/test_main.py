"""The front of the command line: what it answers before torch is imported, and what it says of a verb that is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fsharding.cli import main as front
from fsharding.cli import verbs
from fsharding.cli.main import main


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("--version", 0),
        ("--help", 0),
        ("train --help", 0),
        ("bench step --help", 0),
        ("", 2),
        ("trains", 2),
        ("train --stepss 3", 2),
        ("train --out x --steps many", 2),
        ("train --config no-such-file", 2),
        ("bench stpe", 2),
    ],
)
def test_help_and_usage_errors_wait_for_no_torch(line: str, status: int):
    program = f"""
import sys
from fsharding.cli.main import main
try:
    main({line.split()!r})
except SystemExit as end:
    print(end.code, "torch" in sys.modules, file=sys.stderr)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stderr.splitlines()[-1] == f"{status} False", run.stderr


@pytest.mark.parametrize(
    ("args", "rule", "near"),
    [
        (["trains"], "fsharding has no 'trains'.", "train"),
        (["bench", "stpe", "--rounds", "3"], "fsharding bench has no 'stpe'.", "step"),
    ],
)
def test_a_verb_that_is_not_there(args: list[str], rule: str, near: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(args)
    said = capsys.readouterr().err
    assert end.value.code == 2 and rule in said and f"Did you mean '{near}'?" in said


def test_every_verb_has_a_function():
    named = [*front._VERBS.values(), *front._BENCHES.values()]
    options = {kind for kind, _ in named if isinstance(kind, type)}
    assert options == {*verbs._VERBS}
