"""`fsharding inspect` of a run, `--version`, and errors of `plan`: what a user sees who types them."""

import json

import pytest
import torch

import fsharding as fs
from fsharding.apps.cli.main import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


@pytest.fixture
def a_run(tmp_path):
    opt = fs.sgd(0.1)
    state, _ = fs.setup(
        {"w": torch.ones(4)}, lambda params, x: fs.gather_unit(params)["w"].sum(), opt, fs.random.key(0)
    )
    for step in (5, 10):
        fs.checkpoint.save(tmp_path / "ckpt" / str(step), state.replace(step=torch.tensor(step)))
    return tmp_path


@pytest.mark.parametrize("place", ["", "ckpt"])
def test_a_run_lists_its_checkpoints(a_run, place, capsys):
    (a_run / "ckpt" / "5" / "manifest.json").unlink()
    status, out, _ = run(capsys, "inspect", str(a_run / place))
    lines = out.splitlines()
    assert status == 0 and lines[0] == f"{a_run / place}: 2 checkpoints".replace("//", "/")
    assert lines[1].split() == ["step", "saved", "bytes", "state", "path"]
    assert lines[2].startswith("10 ") and "complete" in lines[2] and lines[2].endswith("ckpt/10")
    assert lines[3].startswith("5 ") and "its save was never finished" in lines[3]
    status, out, _ = run(capsys, "inspect", str(a_run / place), "--json")
    rows = json.loads(out)["checkpoints"]
    assert [row["step"] for row in rows] == [10, 5] and rows[0]["problem"] == "" and rows[0]["bytes"] > 100


def test_a_checkpoint_is_shown_as_before(a_run, capsys):
    status, out, _ = run(capsys, "inspect", str(a_run / "ckpt" / "10"))
    assert status == 0 and out.startswith(f"{a_run / 'ckpt' / '10'}: whole\nstep 10, ")
    status, _, err = run(capsys, "inspect", str(a_run / "nothing"))
    assert status == 2 and err.startswith("ConfigError: fsharding inspect finds nothing at 1 of its paths.")


def test_a_table_with_long_names_fits_a_terminal(tmp_path, capsys):
    long = {
        "a_stack_of_blocks_with_a_name": {"and_a_weight_with_another_one": torch.ones(1000, 64)},
        "b": torch.ones(2),
    }
    state = fs.init_state(
        lambda key: long, fs.adamw(0.1), fs.random.key(0), fs.plan_layout(long, fs.make_mesh(device="cpu"))
    )
    fs.checkpoint.save(tmp_path / "5", state)
    status, out, _ = run(capsys, "inspect", str(tmp_path / "5"))
    lines = out.splitlines()[3:]
    assert status == 0 and max(map(len, lines)) <= 80
    name = "opt_state.mu.a_stack_of_blocks_with_a_name.and_a_weight_with_another_one"
    assert lines[lines.index(name) + 1].split() == ["float32[1000,", "64]", "P()", "256,000"]
    assert any(line.split() == ["params.b", "float32[2]", "P()", "8"] for line in lines)


def test_the_version(capsys):
    assert run(capsys, "--version") == (0, f"fsharding {fs.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["tiny", "--mesh", "dp=0"],
        ["tny"],
        ["tiny", "--mesh", "tp=3"],
        ["tiny", "--mesh", "pp=64"],
        ["tiny", "--strategy", "zero9"],
    ],
    ids=str,
)
def test_plan_names_itself_in_errors(arguments, capsys):
    status, _, err = run(capsys, "plan", *arguments)
    assert status == 2 and err.partition(": ")[2].startswith("fsharding plan"), err
