"""Laws of `fsharding.apps.data`: shards tile the batch, rows depend on (seed, row number) alone, bad data is refused."""

import dataclasses
import json
import os
import pathlib
import string
import sysconfig

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsharding.apps.data import Shard, Tokens, open_data, stdlib_files
from fsharding.base.errors import DataError


def stream_of(size, dtype=np.uint8):
    return (np.arange(size) * 7 % 251).astype(dtype)


@st.composite
def tokens(draw):
    seq_len = draw(st.integers(1, 9))
    return Tokens(
        stream=stream_of(seq_len + draw(st.integers(1, 400)), draw(st.sampled_from([np.uint8, np.uint16, np.int64]))),
        batch_size=draw(st.integers(1, 24)),
        seq_len=seq_len,
        seed=draw(st.integers(0, 2**128 - 1)),
    )


STEPS = st.integers(0, 2**40)


@given(tokens(), STEPS, st.data())
def test_shards_tile_the_global_batch(data, step, draw):
    count = draw.draw(st.sampled_from([n for n in range(1, data.batch_size + 1) if data.batch_size % n == 0]))
    whole = data.batch(step)
    parts = [data.batch(step, Shard(index, count)) for index in range(count)]
    for name in ("tokens", "targets"):
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


@given(tokens(), STEPS)
def test_shapes_dtypes_and_shift(data, step):
    batch = data.batch(step)
    assert list(batch) == ["tokens", "targets"]
    for tensor in batch.values():
        assert tensor.dtype == torch.int64
        assert tensor.shape == (data.batch_size, data.seq_len)
        assert tensor.is_contiguous()
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


@given(tokens(), STEPS)
def test_batch_is_pure_and_its_memory_is_the_callers(data, step):
    first = data.batch(step)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    first["tokens"].fill_(-1)
    assert torch.equal(first["targets"], kept["targets"])
    first["targets"].fill_(-1)
    data.batch(step + 1)
    again = dataclasses.replace(data, stream=data.stream.copy()).batch(step)
    assert all(torch.equal(again[name], kept[name]) for name in kept)


@given(tokens(), STEPS)
def test_a_row_depends_on_its_global_number_alone(data, step):
    first = step * data.batch_size
    starts = data.starts(first, data.batch_size)
    assert ((starts >= 0) & (starts + data.seq_len + 1 <= data.stream.size)).all()
    assert starts.tolist() == [data.starts(first + row, 1)[0] for row in range(data.batch_size)]
    rows = [torch.from_numpy(data.stream[at : at + data.seq_len].astype(np.int64)) for at in starts]
    assert torch.equal(torch.stack(rows), data.batch(step)["tokens"])
    alone = dataclasses.replace(data, batch_size=1)
    assert torch.equal(alone.batch(first)["tokens"], data.batch(step)["tokens"][:1])


@given(tokens(), STEPS, st.data())
def test_documents_of_a_row_are_those_of_the_stream(data, step, draw):
    inner = draw.draw(st.sets(st.integers(1, data.stream.size - 1), max_size=30))
    packed = dataclasses.replace(data, begins=np.array([0, *sorted(inner)]))
    plain, batch = data.batch(step), packed.batch(step)
    assert torch.equal(plain["tokens"], batch["tokens"]) and batch["documents"].dtype == torch.int64
    owner = torch.from_numpy(np.cumsum([i in inner for i in range(data.stream.size)]))
    for row, start in enumerate(data.starts(step * data.batch_size, data.batch_size)):
        mine, after = (owner[start + i : start + i + data.seq_len] for i in (0, 1))
        assert torch.equal(batch["documents"][row].diff(), mine.diff())
        assert torch.equal(batch["targets"][row], torch.where(mine == after, plain["targets"][row], -100))
    assert packed.fingerprint() != data.fingerprint()


def test_documents_of_files_and_separators(tmp_path):
    for name, text in (("a", b"xyz"), ("b", b""), ("c", b"pq")):
        (tmp_path / name).write_bytes(text)
    assert open_data(str(tmp_path), batch_size=1, seq_len=1, documents=True).begins.tolist() == [0, 3]
    assert open_data(str(tmp_path), batch_size=1, seq_len=1).begins is None
    path = tmp_path / "ids.bin"
    path.write_bytes(bytes([5, 9, 7, 9, 9, 1]))
    sidecar = tmp_path / "ids.bin.json"
    sidecar.write_text(json.dumps({"dtype": "uint8", "separator": 9}))
    assert open_data(str(path), batch_size=1, seq_len=1, documents=True).begins.tolist() == [0, 2, 4, 5]
    assert open_data(str(path), batch_size=1, seq_len=1).begins is None
    sidecar.write_text(json.dumps({"dtype": "uint8"}))
    with pytest.raises(DataError) as caught:
        open_data(str(path), batch_size=1, seq_len=1, documents=True)
    assert str(caught.value).replace(str(tmp_path), "DIR") == (
        "fs.data.open_data cannot tell the documents of DIR/ids.bin.\n"
        'Write the id that ends a document to DIR/ids.bin.json, such as {"separator": 0}.'
    )


def test_every_start_is_reached_about_equally_often():
    data = Tokens(stream=stream_of(15), batch_size=1, seq_len=5, seed=3)
    counts = np.bincount(data.starts(0, 10_000), minlength=10)
    assert counts.size == 10
    assert abs(counts - 1000).max() < 150


def test_known_starts_never_change():
    data = Tokens(stream=stream_of(1000), batch_size=4, seq_len=8, seed=0)
    assert data.starts(0, 5).tolist() == [731, 387, 29, 926, 442]


@given(st.integers(0, 2**64), st.integers(0, 2**64))
def test_two_seeds_differ(a, b):
    one, two = (Tokens(stream=stream_of(100_000), batch_size=16, seq_len=4, seed=seed) for seed in (a, b))
    assert (a == b) == (one.starts(0, 16).tolist() == two.starts(0, 16).tolist())
    assert (a == b) == (one.fingerprint() == two.fingerprint())


def test_only_the_rows_of_the_shard_are_read():
    class Watched(np.ndarray):
        reads = 0

        def __getitem__(self, key):
            Watched.reads += 1
            return super().__getitem__(key)

    data = Tokens(stream=stream_of(500).view(Watched), batch_size=12, seq_len=4)
    data.batch(3, Shard(1, 4))
    assert Watched.reads == 3


def test_fingerprint_sees_every_part():
    base = Tokens(stream=stream_of(1000), batch_size=4, seq_len=8, seed=0)
    other = stream_of(1000)
    other[500] += 1
    changes = [
        {"batch_size": 5},
        {"seq_len": 9},
        {"seed": 1},
        {"stream": other},
        {"stream": stream_of(1000, np.uint16)},
        {"stream": stream_of(999)},
    ]
    prints = [base.fingerprint(), *(dataclasses.replace(base, **change).fingerprint() for change in changes)]
    assert len(set(prints)) == len(prints)
    assert all(len(text) == 16 and set(text) <= set(string.hexdigits) for text in prints)
    assert dataclasses.replace(base, source="elsewhere").fingerprint() == prints[0]


def test_fingerprint_of_a_long_stream_sees_its_ends():
    size = 64 * 4096 + 10_000
    prints = set()
    for at in (None, 0, size - 1):
        stream = stream_of(size)
        if at is not None:
            stream[at] += 1
        prints.add(Tokens(stream=stream, batch_size=1, seq_len=1).fingerprint())
    assert len(prints) == 3


@given(st.integers(1, 8), st.integers(1, 8))
def test_rows_of_a_shard(count, rows):
    parts = [list(Shard(index, count).rows(count * rows)) for index in range(count)]
    assert [row for part in parts for row in part] == list(range(count * rows))
    assert all(len(part) == rows for part in parts)


def test_directories_are_read_in_order_without_hidden_files(tmp_path):
    for name, text in {"b.txt": "B", "a/z.txt": "Z", "a.txt": "A", ".hidden": "H", ".git/x": "G", "empty": ""}.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    os.symlink(tmp_path / "nowhere", tmp_path / "in" / "dangling")
    os.symlink(tmp_path / "in" / "b.txt", tmp_path / "in" / "c.txt")  # a file counts once
    data = open_data(str(tmp_path / "in"), batch_size=1, seq_len=1)
    assert data.stream.tobytes() == b"AZB"
    assert data.vocab_size == 256
    assert not data.stream.flags.writeable
    assert open_data(str(tmp_path / "in"), batch_size=1, seq_len=1, documents=True).begins.tolist() == [0, 1, 2]


def test_standard_library_files():
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = stdlib_files()
    names = [file.relative_to(root).as_posix() for file in files]
    assert names == sorted(names)
    assert "dataclasses.py" in names
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"site-packages", "test", "tests", "idle_test"}
    assert all(name.endswith(".py") for name in names)
    assert 1 << 22 < sum(file.stat().st_size for file in files) <= 1 << 24
    few = stdlib_files(max_bytes=100_000)
    assert few == files[: len(few)]
    assert sum(file.stat().st_size for file in few) <= 100_000


def test_open_default():
    data = open_data("default", batch_size=4, seq_len=16, seed=5)
    assert (data.global_batch_size, data.seq_len, data.seed) == (4, 16, 5)
    assert data.source == "the Python standard library"
    assert bytes(data.batch(0)["tokens"][0].tolist()).isascii()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_token_files(tmp_path, dtype):
    path = tmp_path / "data.bin"
    ids = stream_of(300, np.dtype(dtype).newbyteorder("<"))
    ids.tofile(path)
    pathlib.Path(f"{path}.json").write_text(json.dumps({"dtype": dtype}))
    data = open_data(str(path), batch_size=4, seq_len=8, seed=1)
    assert isinstance(data.stream, np.memmap)
    assert data.vocab_size == int(ids.max()) + 1
    same = Tokens(stream=ids, batch_size=4, seq_len=8, seed=1, vocab_size=data.vocab_size)
    assert torch.equal(data.batch(7)["targets"], same.batch(7)["targets"])
    assert data.fingerprint() == same.fingerprint()


def test_open_token_file_with_and_without_sidecar(tmp_path):
    path = tmp_path / "data.bin"
    stream_of(300, "<u4").tofile(path)
    assert open_data(str(path), batch_size=1, seq_len=1, seed=0).stream.dtype == "<u2"
    sidecar = pathlib.Path(f"{path}.json")
    sidecar.write_text(json.dumps({"dtype": "uint32", "vocab_size": 1000, "tokenizer": "x"}))
    data = open_data(str(path), batch_size=1, seq_len=1, seed=0)
    assert data.stream.dtype == "<u4"
    assert data.vocab_size == 1000


def fails(tmp_path, text, call, *args, **kwargs):
    with pytest.raises(DataError) as caught:
        call(*args, **kwargs)
    assert str(caught.value).replace(str(tmp_path), "DIR") == text


ONE = {"batch_size": 1, "seq_len": 1}


def test_errors_of_shards(tmp_path):
    fails(tmp_path, "fs.data.Shard got index 4 for count 4.\nPass 0 <= index < count.", Shard, 4, 4)
    fails(tmp_path, "fs.data.Shard got index -1 for count 4.\nPass 0 <= index < count.", Shard, -1, 4)
    fails(tmp_path, "fs.data.Shard got index 0 for count 0.\nPass 0 <= index < count.", Shard, 0, 0)
    data = Tokens(stream=stream_of(100), batch_size=8, seq_len=4)
    fails(
        tmp_path,
        "fs.data.Shard.rows cannot divide batch_size 8 among shard.count 3 data ranks.\n"
        "Make the global batch a multiple of 3: batch_size 6 or 9.",
        data.batch,
        0,
        Shard(0, 3),
    )
    fails(
        tmp_path,
        "fs.data.Shard.rows cannot divide batch_size 8 among shard.count 16 data ranks.\n"
        "Make the global batch a multiple of 16: batch_size 16.",
        data.batch,
        0,
        Shard(0, 16),
    )
    fails(tmp_path, "fs.data.Tokens.batch got step -1.\nSteps count from 0.", data.batch, -1)


def test_errors_of_tokens(tmp_path):
    fails(
        tmp_path,
        "fs.data.Tokens got arguments out of range.\n"
        "  batch_size is 0: not positive.\n"
        "  seq_len is -1: not positive.\n"
        "  vocab_size is 0: not positive.\n"
        "  seed is -3: not in [0, 2**128).\n"
        "Give positive sizes and a seed >= 0.",
        Tokens,
        stream=stream_of(9),
        batch_size=0,
        seq_len=-1,
        vocab_size=0,
        seed=-3,
    )
    fails(
        tmp_path,
        "fs.data.Tokens cannot read a stream of float32 with 2 dimensions from an array.\nGive a flat array of integer token ids.",
        Tokens,
        stream=np.zeros((3, 4), np.float32),
        **ONE,
    )
    fails(
        tmp_path,
        "fs.data.Tokens cannot take a row of 9 tokens from the 8 of an array.\nGive more data, or seq_len 7 or less.",
        Tokens,
        stream=stream_of(8),
        batch_size=1,
        seq_len=8,
    )
    fails(
        tmp_path,
        "fs.data.Tokens.batch read the id 9 at 0 of an array, outside [0, 3).\n"
        "Give the vocab_size of the tokenizer that wrote the data.",
        Tokens(stream=np.array([9, 1]), batch_size=2, seq_len=1, vocab_size=3).batch,
        0,
    )


def test_errors_of_files(tmp_path):
    missing = "fs.data.open_data cannot read DIR/a: No such file or directory.\nCorrect or remove it."
    fails(tmp_path, missing, open_data, str(tmp_path / "a"), **ONE)
    none = "fs.data.open_data found no files in DIR.\nName files, or a directory that has some."
    fails(tmp_path, none, open_data, str(tmp_path), **ONE)
    (tmp_path / "empty").touch()
    text = "fs.data.Tokens cannot take a row of 2 tokens from the {} of DIR.\nGive more data."
    fails(tmp_path, text.format(0), open_data, str(tmp_path), **ONE)
    (tmp_path / "short").write_text("x")
    fails(tmp_path, text.format(1), open_data, str(tmp_path), **ONE)
    assert stdlib_files(0) == []


def test_error_of_a_directory_that_cannot_be_listed(tmp_path, monkeypatch):
    def walk(root, onerror):
        onerror(PermissionError(13, "Permission denied", f"{root}/locked"))
        return []

    monkeypatch.setattr(os, "walk", walk)
    text = "fs.data.open_data cannot list DIR/locked: Permission denied.\nMake it readable."
    fails(tmp_path, text, open_data, str(tmp_path), **ONE)


def test_errors_of_token_files(tmp_path):
    path = tmp_path / "data.bin"
    mend = "\nGive the path of a file of token ids, with another dtype than uint16 in DIR/data.bin.json."
    text = "fs.data.open_data cannot open DIR/data.bin: No such file or directory."
    fails(tmp_path, text + mend, open_data, str(path), **ONE)
    path.write_bytes(b"12345")
    text = "fs.data.open_data cannot open DIR/data.bin: its size isn't a multiple of the 2 bytes of uint16."
    fails(tmp_path, text + mend, open_data, str(path), **ONE)
    path.write_bytes(b"")
    text = "fs.data.Tokens cannot take a row of 2 tokens from the 0 of DIR/data.bin.\nGive more data."
    fails(tmp_path, text, open_data, str(path), **ONE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "[1]"),
        ('{"dtype": 2}', "{'dtype': 2}"),
        ('{"dtype": "float32"}', "{'dtype': 'float32'}"),
        ('{"vocab_size": 0}', "{'vocab_size': 0}"),
        ('{"vocab_size": true}', "{'vocab_size': True}"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)
def test_errors_of_sidecars(tmp_path, text, said):
    path = tmp_path / "data.bin"
    stream_of(300, "<u2").tofile(path)
    pathlib.Path(f"{path}.json").write_text(text)
    fails(
        tmp_path,
        f"fs.data.open_data cannot use the sidecar file DIR/data.bin.json.\n  It reads: {said}\n"
        'It holds one JSON object such as {"dtype": "uint16", "vocab_size": 50257}, or uint8, or uint32.',
        open_data,
        str(path),
        **ONE,
    )
