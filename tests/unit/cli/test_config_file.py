"""Options in a file: the command line wins over it, it wins over defaults, and no file gets through with a mistake."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import tyro

from fsharding.apps.cli.config_file import OWN_OPTIONS, config_text, with_config_file
from fsharding.apps.cli.main import main
from fsharding.apps.cli.options import TrainConfig
from fsharding.base.errors import ConfigError


def parsed(*args):
    return tyro.cli(TrainConfig, args=with_config_file([*map(str, args)]))


def written(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


YAML = """
out: runs/a
save-every: 5
lr: 1e-3
clip: 2
plot: no
ranks: null
log: [json, tensorboard]
attention: gather
deadline: 2030-01-31T18:00:00
"""
TOML = """
out = "runs/a"
save_every = 5
lr = 1e-3
clip = 2
plot = false
log = ["json", "tensorboard"]
attention = "gather"
deadline = 2030-01-31T18:00:00
"""


@pytest.mark.parametrize(("text", "name"), [(YAML, "a.yaml"), (TOML, "a.toml")])
def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(text, name, tmp_path):
    path = written(tmp_path, text, name)
    config = TrainConfig(Path("runs/a"), save_every=5, lr=1e-3, clip=2.0, plot=False, log=("json", "tensorboard"))
    config = replace(config, attention="gather", deadline="2030-01-31T18:00:00", config=path)
    assert parsed("--config", path) == config
    assert parsed("--lr", "2e-3", "--plot", f"--config={path}", "--log", "wandb", "--save_every=7") == replace(
        config, lr=2e-3, plot=True, log=("wandb",), save_every=7
    )


CHANGED = {
    "out": Path("-x y"), "preset": "tiny_llama3", "mesh": "dp=2,tp=2", "stage_layers": "3,5", "resume": "200", "seed": 7,
    "lr": 1e-05, "deadline": "2030-01-31T18:00", "log": ("json", "tensorboard"), "data": "no", "keep": 3, "plot": False,
    "trace": 4, "swap_at": "50=zero1,100=zero3:replica=2", "sequence": True, "timeout": 1e3, "policy": "\u00fc: #\n'\"",
}  # fmt: skip


@pytest.mark.parametrize("changed", [{}, CHANGED])
def test_a_printed_configuration_reads_back_to_the_same(changed, tmp_path):
    config = replace(TrainConfig(Path("runs/a")), **changed)
    path = written(tmp_path, config_text(config))
    assert parsed("--config", path) == replace(config, config=path)


def test_a_deadline_may_be_a_date(tmp_path):
    assert parsed("--out", "a", "--config", written(tmp_path, "deadline: 2030-01-31")).deadline == "2030-01-31"


def test_print_config_prints_and_changes_nothing(tmp_path, capsys):
    path = written(tmp_path, "steps: 7\nseed: 3\n")
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--out", str(tmp_path / "out"), "--seed", "4", "--config", str(path), "--print-config"])
    again = written(tmp_path, capsys.readouterr().out, "again.yaml")
    assert parsed("--config", again) == TrainConfig(tmp_path / "out", steps=7, seed=4, config=again)
    assert not (tmp_path / "out").exists()


def test_a_file_has_every_option_but_those_about_files():
    keys = [line.partition(":")[0] for line in config_text(TrainConfig(Path("a"))).splitlines()]
    assert keys == [field.name for field in fields(TrainConfig) if field.name not in OWN_OPTIONS]


def test_all_mistakes_of_a_file_are_one_error(tmp_path, capsys):
    wrong = {"stesp": 3, "lr": "fast", "steps": 2.5, "plot": 1, "attention": "rign", "batch": True, "seq": None}
    path = written(tmp_path, json.dumps({**wrong, "save-every": 1, "save_every": 2, "config": "b", "log": [3]}))
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--out", str(tmp_path / "out"), "--config", str(path)])
    assert capsys.readouterr().err.splitlines() == [
        f"ConfigError: fsharding train --config cannot take all of {path}.",
        "  stesp: unknown. Did you mean 'steps'?",
        "  lr: a number, not 'fast'",
        "  steps: an integer, not 2.5",
        "  plot: true or false, not 1",
        "  attention: one of ring, gather, ulysses, not 'rign'",
        "  batch: an integer, not True",
        "  seq: an integer, not None",
        "  save_every: occurs twice",
        "  config: unknown.",
        "  log: text or a list of it, not [3]",
        "Keys are the options of `fsharding train --help`.",
    ]
    assert not (tmp_path / "out").exists()


HOSTILE = {
    "no mapping": "- a\n- b\n",
    "an object": "lr: !!python/object/apply:os.getcwd []\n",
    "an alias": "a: &x [1]\nb: *x\n",
    "depth": "a: " + "[" * 30_000,
    "size": "a: " + "x" * (1 << 16),
    "no text": "\udcff",
    "a long number": f"lr: {'9' * 5000}\n",
    "unfinished": "lr: 'a\n",
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("name", ["a.yaml", "a.toml"])
@pytest.mark.timeout(5)
def test_no_file_hangs_or_fills_the_process(case, name, tmp_path):
    text = HOSTILE[case] if name == "a.yaml" else HOSTILE[case].replace(":", " =", 1)
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"cannot read .*[\s\S]*--print-config writes one"):
        parsed("--out", "a", "--config", path)


def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        parsed("--config", tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="isn't a plain file"):
        parsed("--config", tmp_path)
    with pytest.raises(ConfigError, match=r"got 2 files: a, b\.\nGive one file\."):
        parsed("--config", "a", "--config=b")
    assert with_config_file(["--out", "a"]) == ["--out", "a"]


def test_other_verbs_have_no_file(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "tiny", "--config", str(tmp_path / "nowhere.yaml")])
    assert "fsharding plan has no --config." in capsys.readouterr().err
