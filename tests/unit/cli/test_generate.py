"""`fsharding generate`: text from a run, from a checkpoint that notes its model, from Hugging Face; what it refuses."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import fsharding as fs
from fsharding.apps.cli.generate import BYTES, _Shown
from fsharding.apps.cli.main import main
from tests.helpers import slow

CONFIG = fs.models.DecoderConfig(vocab_size=256, dim=32, layers=2, heads=4, kv_heads=2, intermediate_size=48)
SMALL = fs.models.DecoderConfig(vocab_size=100, dim=16, layers=1, heads=2, kv_heads=2, intermediate_size=24)
OPTIONS = ["--seq", "32", "--batch", "8", "--steps", "4"]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def saved(folder, config, extra=None):
    state, _ = fs.setup(fs.models.decoder(config), None, fs.sgd(0.1), fs.random.key(0))
    fs.checkpoint.save(folder, state, extra=extra)
    return state


def words(folder):
    """A tokenizer of a hundred words."""
    names = ["to", "be", "or", "not", *(f"w{i}" for i in range(96))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return names


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Directories by name; `run` is of the training command, `noted` and `bare` are checkpoints alone."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.raises(SystemExit) as ended:
        main(["train", "--preset", "tiny", *OPTIONS, "--save-every", "2", "--out", str(folder / "run"), "--no-plot"])
    assert ended.value.code == 0
    saved(folder / "noted", CONFIG, {"model": fs.hf.config_json(CONFIG)})
    saved(folder / "bare", CONFIG)
    saved(folder / "words", SMALL, {"model": fs.hf.config_json(SMALL)})
    ids = {"preset": "tiny", "config": {"data": "train.bin", "tokenizer": "None"}}
    saved(folder / "ids", fs.models.presets.recipe("tiny").config, ids)
    words(folder)
    (folder / "config.json").write_text(json.dumps(fs.hf.config_json(CONFIG)))
    return folder


@slow
def test_the_text_of_a_run_follows_from_seed_and_prompt(runs, capsys):
    command = ["generate", runs / "run", "--prompt", "import ", "--tokens", "12"]
    status, out, err = run(capsys, *command, "--seed", "1", "--json")
    row = json.loads(out)
    assert (status, err, row["prompt"], row["tokens"]) == (0, "", "import ", 12)
    config = fs.models.presets.recipe("tiny").config
    layout = fs.plan_layout(fs.models.decoder(config), fs.make_mesh(device="cpu"))
    state = fs.checkpoint.load(runs / "run" / "ckpt" / "4", layout)
    options = {"key": fs.random.key(1), "temperature": 0.8}
    tokens = fs.models.generate(config, state, [[*b"import "]], 12, **options)
    assert row["text"] == bytes(tokens[0].tolist()).decode(errors="replace")
    _, again, _ = run(capsys, *command, "--seed", "2", "--json")
    assert json.loads(again)["text"] != row["text"]
    _, older, _ = run(capsys, "generate", runs / "run" / "ckpt" / "2", *command[2:], "--seed", "1", "--json")
    assert json.loads(older)["text"] != row["text"]


def test_the_prompt_and_then_the_text_are_printed(runs, capsys):
    options = ["--prompt", "x = 1\n", "--tokens", "9", "--top-k", "5", "--top-p", "0.9", "--dtype", "bfloat16"]
    _, row, _ = run(capsys, "generate", runs / "noted", *options, "--json")
    status, out, err = run(capsys, "generate", runs / "noted", *options)
    printed = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in json.loads(row)["text"])
    assert (status, out, err) == (0, f"x = 1\n{printed}\n", "")


@pytest.mark.parametrize("option", [["--preset", "tiny"], ["--model", "config.json"]], ids=lambda x: x[0])
def test_the_options_say_the_model_that_a_checkpoint_does_not(runs, option, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    path = "bare" if option[0] == "--model" else "ids"
    more = [] if path == "bare" else ["--tokenizer", "."]
    status, out, err = run(capsys, "generate", path, *option, *more, "--tokens", "3", "--prompt", "to be", "--json")
    assert (status, err, json.loads(out)["tokens"]) == (0, "", 3)


def test_a_tokenizer_and_the_token_that_ends_the_text(runs, capsys):
    command = ["generate", runs / "words", "--tokenizer", runs / "tokenizer.json", "--prompt", "to be or", "--json"]
    row = json.loads(run(capsys, *command, "--temperature", "0", "--tokens", "4")[1])
    names = row["text"].split()
    assert len(names) == 4 == row["tokens"] and row["text"].startswith(" "), "prompt and text are one line"
    ids = words(runs)
    ended = json.loads(run(capsys, *command, "--temperature", "0", "--tokens", "4", "--eos", ids.index(names[0]))[1])
    assert (ended["text"], ended["tokens"]) == ("", 1)


@slow
def test_the_tokenizer_of_a_run_is_the_one_of_its_text(tmp_path, capsys):
    words(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "to be or not to be"}\n' * 99)
    options = [
        *OPTIONS[:4],
        "--steps",
        "20",
        "--tokenizer",
        tmp_path,
        "--eos",
        "w1",
        "--data",
        tmp_path / "text.jsonl",
        "--no-plot",
    ]
    assert run(capsys, "train", "--preset", "tiny", *options, "--out", tmp_path / "run")[0] == 0
    command = ["generate", tmp_path / "run", "--prompt", "or not", "--tokens", "3", "--temperature", "0", "--json"]
    status, out, err = run(capsys, *command)
    assert (status, err, json.loads(out)["text"].split()[:2]) == (0, "", ["to", "be"])


def test_a_directory_of_hugging_face_generates(runs, tmp_path, capsys):
    state = saved(tmp_path / "saved", SMALL)
    fs.hf.save(tmp_path / "model", state.params, SMALL, state.layout)
    ids = words(tmp_path / "model")
    row = json.loads(
        run(capsys, "generate", tmp_path / "model", "--prompt", "to be", "--temperature", "0", "--json")[1]
    )
    tokens = fs.models.generate(SMALL, state, [[0, 1]], 100)[0].tolist()
    assert row["text"].split() == [ids[token] for token in tokens]


@slow
def test_a_checkpoint_of_the_example_generates(tmp_path, capsys):
    pretrain = importlib.import_module("examples.pretrain")
    pretrain.train(pretrain.Config(out=tmp_path, every=24))
    capsys.readouterr()
    status, out, err = run(capsys, "generate", tmp_path, "--prompt", "def ", "--tokens", "5", "--json")
    assert (status, err, json.loads(out)["tokens"]) == (0, "", 5)


def test_half_a_character_waits_for_its_other_half(capsys):
    shown = _Shown(BYTES, [], None, quiet=False)
    seen = []
    for byte in "é\x1b€".encode():
        shown.add(torch.tensor([byte]))
        seen.append(capsys.readouterr().out)
    assert seen == ["", "é", "\\x1b", "", "", "€"] and shown.text == "é\x1b€"
    shown.add(torch.tensor([0xC3]))
    shown.show("\n")
    assert capsys.readouterr().out == "\ufffd\n"


WRONG = {
    "no such path": (["nothing"], "finds nothing at 1 of its paths.", "  nothing\nCorrect them"),
    "no tokens": (["run", "--tokens", "0"], "fsharding generate got numbers out of range", "--tokens 0: at least 1"),
    "numbers": (["run", "--top-k", "0", "--top-p", "2", "--temperature", "-1"], "--top-k 0: at least 1", "--top-p 2.0:"),
    "wide seed": (["run", "--seed", str(2**64)], "got numbers out of range", f"--seed {2**64}: 0 to 2**64 - 1"),
    "dtype": (["run", "--dtype", "float23"], "knows no --dtype 'float23'", "Did you mean 'float32'?"),
    "no model": (["bare"], "cannot find the model", "Give --preset NAME or --model config.json"),
    "another model": (["noted", "--preset", "tiny"], "finds different parameters in", "params.blocks.down is [2, 48, 32]"),
    "no such preset": (["bare", "--preset", "tny"], "knows no preset 'tny'", "Did you mean 'tiny'?"),
    "an empty prompt": (["run", "--prompt", ""], "got a prompt without tokens", "Pass --prompt"),
    "outside": (["words", "--tokenizer", "none.json"], "finds nothing at 1 of its paths.", "--tokenizer none.json"),
    "no tokenizer there": (["words", "--tokenizer", "words"], "cannot read", "Pass a tokenizer.json"),
    "no tokenizer": (["words"], "cannot find the tokenizer", "--tokenizer tokenizer.json"),
    "ids": (["ids"], "cannot find the tokenizer", "--tokenizer tokenizer.json"),
    "stages": (["run", "--ranks", "2", "--mesh", "pp=2"], "cannot generate in stages: --mesh has pp=2", "Use tp or dp"),
    "a mesh": (["run", "--ranks", "2", "--mesh", "dp=3"], "--mesh dp=3", "2"),
    "heads": (["run", "--ranks", "3"], "does not fit the mesh", "4 heads: not a multiple of tp=3"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "rule", "mend"), WRONG.values(), ids=WRONG)
def test_what_cannot_run_is_refused_before_a_rank_starts(runs, arguments, rule, mend, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    status, out, err = run(capsys, "generate", *arguments)
    assert (status, out) == (2, "") and rule in err and mend in err and "Traceback" not in err


def test_bytes_outside_of_the_vocabulary_are_named(tmp_path: Path, capsys):
    extra = {"model": fs.hf.config_json(SMALL), "config": {"data": "default"}}
    saved(tmp_path / "saved", SMALL, extra)
    status, _, err = run(capsys, "generate", tmp_path / "saved", "--prompt", "zoo")
    assert status == 2 and "3 tokens outside the vocabulary of 100" in err and "'z' is 122, 'o' is 111" in err
