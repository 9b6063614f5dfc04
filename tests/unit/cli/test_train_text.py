"""Runs on text with a tokenizer: data sets of all kinds, validation on them, and positions that are gone on from."""

import json
import os
from dataclasses import replace

import pytest

from fsharding import checkpoint
from fsharding.apps.cli.config import check
from fsharding.apps.cli.documents import open_documents, open_encoder
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.train import train
from fsharding.apps.data import Packed
from fsharding.base.calls import call_as
from fsharding.base.errors import CheckpointError, ConfigError, DataError
from tests.commands import read_metrics
from tests.helpers import refusal

tokenizers = pytest.importorskip("tokenizers")
datasets = pytest.importorskip("datasets")

TEXTS = [f"{'to be or not to be ' * (1 + i % 5)}that is {i}" for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = ["<unk>", "</s>", *sorted({word for text in TEXTS for word in text.split()})]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    for name, texts in (("train", TEXTS), ("val", TEXTS[::7])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(folder / "saved")
    (folder / "files").mkdir()
    for i, text in enumerate(TEXTS[:20]):
        (folder / "files" / f"{i:02}.txt").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def _cache(folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")


@pytest.fixture
def config(folder, tmp_path):
    return TrainConfig(
        tmp_path / "out", data=str(folder / "train.jsonl"), tokenizer=folder / "tokenizer.json", text_column="body",
        steps=6, batch=2, seq=32, plot=False,
    )  # fmt: skip


def ran(config):
    check(config, 1)
    train(config)
    return [(row["loss"], row.get("val_loss")) for row in read_metrics(config.metrics)]


def test_a_run_that_goes_on_has_the_losses_of_one_that_never_stopped(config, folder, tmp_path, monkeypatch):
    config = replace(config, documents=True, val_data=str(folder / "val.jsonl"), val_every=3, val_batches=2)
    want = ran(config)
    assert all(val is None for _, val in want[:2]) and want[2][1] and want[5][1]
    parts = replace(config, out=tmp_path / "parts", save_every=2)
    ran(replace(parts, steps=4))
    assert checkpoint.metadata(parts.checkpoints / "4").data["all"]["step"] == 4
    places = []
    read = Packed._read
    monkeypatch.setattr(Packed, "_read", lambda data, place: [places.append(place.step), read(data, place)][1])
    resumed = replace(parts, resume="auto")
    train(resumed)
    rows = [(row["loss"], row.get("val_loss")) for row in read_metrics(parts.metrics)]
    assert [row for n, row in enumerate(rows) if n != 3] == [row for n, row in enumerate(want) if n != 3]
    assert rows[3][0] == want[3][0]  # the run that was shorter has a validation at its end
    assert {*places} == {0, 1, 4, 5}, "those of the validation, and those from the position on"


def test_kinds_of_data(config, folder):
    (loss, *_), *_ = jsonl = ran(replace(config, steps=2))
    assert ran(replace(config, steps=2, data=str(folder / "saved"))) == jsonl
    (other, *_), *_ = ran(replace(config, steps=2, data=str(folder / "files")))
    assert other != loss


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"data": "DIR/saved", "tokenizer": None}, ConfigError, "fsharding train cannot read the data set --data DIR/saved byte by byte.\nPass its tokenizer: --tokenizer tokenizer.json."),
        ({"data": "DIR/a.bin"}, ConfigError, "fsharding train got --tokenizer DIR/tokenizer.json, but --data DIR/a.bin already has tokens.\nOmit --tokenizer."),
        ({"text_column": "text"}, DataError, "fsharding train finds no column 'text' in DIR/train.jsonl.\nGive one of 'body'."),
        ({"val_data": "DIR/nowhere"}, ConfigError, f"fsharding train finds nothing at 1 of its paths.\n  --val-data DIR/nowhere\nCorrect them; relative ones begin at {os.getcwd()}, and fsharding downloads nothing."),
        ({"eos": "<end>"}, DataError, "fsharding train got --eos '<end>', which isn't a token of DIR/tokenizer.json.\nPass one of its tokens, or an id, such as --eos 0."),
        ({"seq": 2000}, DataError, "fs.data.packed got 1320 tokens in all documents; a row takes 2001.\nGive more documents, or seq_len 1319 or less."),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_mistakes(config, folder, change, kind, text):
    change = {k: v.replace("DIR", str(folder)) if isinstance(v, str) else v for k, v in change.items()}
    (folder / "a.bin").touch()
    assert (
        refusal(call_as, "fsharding train", check, replace(config, **change), 1, kind=kind).replace(str(folder), "DIR")
        == text
    )
    assert not config.out.exists()


def test_a_tokenizer_that_is_larger_than_the_model(config, tmp_path):
    words = {f"w{i}": i for i in range(300)} | {"</s>": 300}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "large.json"))
    text = refusal(
        call_as, "fsharding train", check, replace(config, tokenizer=tmp_path / "large.json"), 1, kind=ConfigError
    )
    assert text == (
        f"fsharding train cannot embed 301 tokens of {config.data} in the 256 of --preset tiny.\n"
        "Choose a preset with a larger vocabulary, or different data."
    )


def test_other_data_is_another_run(config, folder):
    ran(replace(config, steps=2))
    other = replace(config, data=str(folder / "val.jsonl"), resume="auto")
    assert "cannot continue from" in refusal(call_as, "fsharding train", check, other, 1, kind=CheckpointError)


def test_the_end_of_documents_is_found_beside_a_tokenizer(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / "tokenizer.json").read_text())
    assert open_encoder(tmp_path, "").eos == 1  # </s>
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "or"}}))
    found = open_encoder(tmp_path / "tokenizer.json", "")
    assert found.tokenizer.id_to_token(found.eos) == "or" and found("to or") == found.tokenizer.encode("to or").ids
    assert open_encoder(tmp_path, "7").eos == 7 and found.vocab_size == found.tokenizer.get_vocab_size()
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace("</s>", "<end>"))
    (tmp_path / "tokenizer_config.json").unlink()
    assert "cannot find the end-of-document token" in refusal(open_encoder, tmp_path, "", kind=DataError)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "as a tokenizer: " in refusal(open_encoder, tmp_path, "", kind=DataError)
    assert "as a tokenizer: " in refusal(open_encoder, tmp_path / "nowhere.json", "", kind=DataError)


@pytest.mark.parametrize("kind", ["jsonl", "folder", "parquet", "saved", "saved_dict", "texts"])
def test_documents_of_files(kind, folder, tmp_path):
    made = datasets.Dataset.from_dict({"body": TEXTS, "other": ["x"] * len(TEXTS)})
    path = {"jsonl": folder / "train.jsonl", "texts": folder / "files", "saved": folder / "saved"}.get(kind)
    if kind == "folder":
        path = tmp_path / "rows"
        path.mkdir()
        (path / "a.jsonl").write_text((folder / "train.jsonl").read_text())
    elif kind == "parquet":
        made.to_parquet(path := tmp_path / "a.parquet")
    elif kind == "saved_dict":
        datasets.DatasetDict(train=made).save_to_disk(path := tmp_path / "saved")
    found = open_documents(str(path), "body")
    assert [*found] == (TEXTS[:20] if kind == "texts" else [{"body": text} for text in TEXTS])


def test_paths_that_are_no_documents(tmp_path):
    assert "found no files in" in refusal(open_documents, str(tmp_path), "text", kind=DataError)
    assert "cannot read" in refusal(open_documents, str(tmp_path / "nowhere"), "text", kind=DataError)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    assert "can't decode byte 0xff in position 0" in refusal(open_documents, str(tmp_path), "text", kind=DataError)
    (tmp_path / "b.jsonl").write_text("{}")
    assert "files of 2 kinds, .jsonl, .txt" in refusal(open_documents, str(tmp_path), "text", kind=DataError)
