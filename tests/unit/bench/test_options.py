"""Options of measurements are read without torch, and wrong ones are refused before ranks start."""

import importlib
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from bench.__main__ import BENCHES, main
from fsharding.apps.cli import usage
from tests.helpers import slow

URL = "s3://bucket/run"


def refused(line, capsys):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("stpe --rounds 3", "ConfigError: python -m bench has no 'stpe'.\nWrite one of step, memory, "),
        ("stpe", "Did you mean 'step'?"),
        ("step --rnks 2", "python -m bench step has no --rnks.\npython -m bench step --help lists its options."),
        ("step --preset llama3", "python -m bench step knows no preset 'llama3'.\nUse one of tiny, "),
        ("scaling --units 0 2", "python -m bench scaling cannot measure this.\n  units: (0, 2) (must be above 0)\n"),
        ("step --contenders ours", "python -m bench step: cannot measure this.\n  ours: not known\nContenders are "),
        ("ranks --ranks 1", "python -m bench ranks: cannot measure this.\nRanks are at least 2; dim is a multiple of 64."),
        ("scaling --dims 65", "python -m bench scaling: cannot measure these points.\nGive dims that are multiples of 64."),
        ("checkpoint --dir " + URL, "python -m bench checkpoint takes paths of files and directories; got URLs."),
        ("step --plot " + URL, "python -m bench step takes paths of files and directories; got URLs."),
        ("step --trace " + URL, "python -m bench step takes paths of files and directories; got URLs."),
        ("pipeline --rest -1", "  rest: -1.0 (must be at least 0)"),
        ("overlap --link-gbs 0", "  link_gbs: 0.0 (must be above 0)"),
        ("overlap --ranks 0 --stages 0", "  ranks: 0 (must be above 0)\n  stages: 0 (must be above 0)\n"),
        ("overlap --microbatches 0", "  --microbatches 0: at least 1"),
        ("overlap --depths 0 -1", "  depths: (0, -1) (must be at least 0)"),
        ("overlap --latency-us -1", "  latency_us: -1.0 (must be at least 0)"),
        ("optimizer --rounds 0", "  rounds: 0 (must be above 0)"),
        ("step --ranks 0", "  ranks: 0 (must be above 0)"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(line, text, capsys):
    assert text in refused(line, capsys)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("step --ranks 4", "got 4 ranks, but a launcher started 2."),
        ("reshard", "got 4 ranks, but a launcher started 2."),
        ("ranks", "Run it without torchrun."),
        ("scaling", "Run it without torchrun."),
    ],
)
def test_ranks_of_a_launcher_are_those_that_measure(line, text, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert text in refused(line, capsys)


@slow
@pytest.mark.parametrize(("line", "status"), [("--help", 0), ("step --help", 0), ("stpe", 2), ("step --rounds 0", 2)])
def test_help_and_usage_errors_wait_for_no_torch(line, status):
    program = f"""
import sys
from bench.__main__ import main
try:
    main({line.split()!r})
except SystemExit as end:
    print(end.code, "torch" in sys.modules, file=sys.stderr)
"""
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd=root
    )
    assert run.stderr.splitlines()[-1] == f"{status} False", run.stderr


def test_every_measurement_has_a_function_and_knows_its_options():
    for name, (kind, _) in BENCHES.items():
        assert callable(getattr(importlib.import_module(f"bench.{name}"), f"bench_{name}"))
        given = [f"--{key.replace('_', '-')}" for key in typing.get_type_hints(kind)]
        usage.check_options(name, kind, given)
