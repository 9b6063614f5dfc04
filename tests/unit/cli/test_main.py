"""The front of the command line: what it answers before torch is imported, and what it says of a verb that is not there."""

from __future__ import annotations

import subprocess
import sys
import typing

import pytest
import tyro

import fsharding as fs
from fsharding.apps.cli import usage, verbs
from fsharding.apps.cli.config import PRECISIONS
from fsharding.apps.cli.main import VERBS, main
from fsharding.models.presets import RECIPES
from fsharding.pipeline.schedule import SCHEDULES
from fsharding.sharding.strategy import STRATEGIES
from fsharding.sharding.strategy_names import STRATEGY_NAMES
from tests.helpers import slow


@slow
@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("--version", 0),
        ("--help", 0),
        ("train --help", 0),
        ("", 2),
        ("trains", 2),
        ("train --out x --steps many", 2),
        ("train --config no-such-file", 2),
        ("train --stepss 3", 2),
        ("train --out x --strategy fsdp", 2),
        ("train --out x --preset llama3", 2),
        ("train --out x --dtype bf16", 2),
        ("train --out x --log tensorbord", 2),
        ("train --out x --stage-layers 3,x", 2),
        ("generate . --eos=-1", 2),
        ("plan tiny --mesh data=2", 2),
        ("inspect nowhere", 2),
    ],
)
def test_help_and_usage_errors_wait_for_no_torch(line: str, status: int):
    program = f"""
import sys
from fsharding.apps.cli.main import main
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
        (["trains"], "fsharding has no trains.", "train"),
    ],
)
def test_a_verb_that_is_not_there(args: list[str], rule: str, near: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(args)
    said = capsys.readouterr().err
    assert end.value.code == 2 and rule in said and f"Did you mean '{near}'?" in said


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "train --stpes 3",  # --out is missing as well: what was mistyped comes first
            "fsharding train has no --stpes.\nfsharding train --help lists its options. Did you mean '--steps'?",
        ),
        (
            "train --otu x --no-plto --save_every=3",
            "fsharding train does not have 2 of these options.\n  --otu: Did you mean '--out'?\n"
            "  --no-plto: Did you mean '--no-plot'?\nfsharding train --help lists its options.",
        ),
        ("--verson", "fsharding has no --verson.\nWrite one of train, generate, plan, doctor, "),
        ("--verson", " first. Did you mean '--version'?"),
        (
            "generate x --dtype bf16",
            "fsharding generate knows no --dtype 'bf16'.\nUse one of float32, bfloat16, float16, fp8, fp8-block, mxfp8, nvfp4.",
        ),
        ("plan tiny --strategy FULL_SHARD", "fsharding plan knows no strategy 'FULL_SHARD'.\nUse one of zero0, "),
        ("plan tiny --strategy FULL_SHARD", " Here that is 'zero3'."),
        ("plan llama3", "fsharding plan knows no preset 'llama3'.\nUse one of tiny, "),
        ("reshard a b --mesh dpp=2", "MeshError: fsharding reshard --mesh dpp=2 got an unknown axis 'dpp'."),
        ("inspect nowhere", "fsharding inspect finds nothing at 1 of its paths.\n  nowhere\nCorrect them; relative "),
        ("generate . --model a --tokenizer b", "finds nothing at 2 of its paths.\n  --tokenizer b\n  --model a\n"),
        ("generate . --eos=-1", "fsharding generate got numbers out of range.\n  --eos -1: the id of a token\n"),
        ("train --out x --data no --val-data nil", "ConfigError: fsharding train finds nothing at 2 of its paths.\n"),
    ],
)
def test_an_error_names_the_command_and_what_is_near(line: str, text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_names_of_options_are_those_of_what_they_stand_for():
    assert tuple(PRECISIONS) == usage.DTYPES
    assert tuple(fs.policies.POLICIES) == usage.POLICIES
    assert tuple(RECIPES) == usage.PRESETS
    assert tuple(SCHEDULES) == usage.SCHEDULES
    assert tuple(STRATEGIES) == STRATEGY_NAMES


def test_every_option_of_every_verb_is_known():
    for name, kind in VERBS.items():
        config = typing.get_type_hints(kind, include_extras=True)
        named = [key for key, hint in config.items() if tyro.conf.Positional not in getattr(hint, "__metadata__", ())]
        given = [f"--{key}=x" for key in named] + [f"--{key.replace('_', '-')}" for key in named]
        assert usage.check_options(name, kind, given) is None, name


def test_every_verb_has_a_function():
    assert {f"run_{name}" for name in VERBS} == {*verbs.__all__}
    assert all(callable(getattr(verbs, name)) for name in verbs.__all__)


def test_a_measurement_is_a_module_of_the_checkout(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "step", "--rounds", "3"])
    assert "type: python -m bench step --rounds 3\n" in capsys.readouterr().err
