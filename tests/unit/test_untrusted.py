"""Opening and parsing files of strangers: what is let in, what is refused, and that nothing waits or grows."""

import functools
import json
import os
import socket
from pathlib import Path

import pytest

from fsharding.base.untrusted import beside, open_plain, own_tree, parse_json, read_json, read_plain
from tests import helpers

refusal = functools.partial(helpers.refusal, kind=ValueError)


# --------------------------------------------------------------------------------------------------------------- files
def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name in ("link", "folder", "fifo", "socket"):
            assert refusal(open_plain, tmp_path / name) == "it isn't a plain file"
            assert refusal(read_plain, tmp_path / name, 10) == "it isn't a plain file"
    assert refusal(open_plain, "/dev/zero") == "it isn't a plain file"
    with open_plain(tmp_path / "file") as file:
        assert file.read() == b"abc"
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "absent")


def test_a_file_that_becomes_a_fifo_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    plain = os.lstat(tmp_path / "file")
    monkeypatch.setattr(os, "lstat", lambda path: plain)
    before = len(os.listdir("/proc/self/fd"))
    assert refusal(open_plain, tmp_path / "fifo") == "it isn't a plain file"
    assert len(os.listdir("/proc/self/fd")) == before


def test_sizes_are_compared_before_anything_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert read_plain(tmp_path / "file", 3) == b"abc"
    assert refusal(read_plain, tmp_path / "file", 2) == "it has 3 bytes; at most 2 are read"
    os.truncate(tmp_path / "file", 1 << 40)
    assert refusal(read_json, tmp_path / "file", most=1 << 20) == (
        "it has 1,099,511,627,776 bytes; at most 1,048,576 are read"
    )


def test_links_lead_where_the_folder_may_lead(tmp_path):
    model = tmp_path / "models--org--name"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    (model / "blobs" / "hash").write_bytes(b"x")
    (tmp_path / "outside").write_bytes(b"y")
    for folder in (snapshot, snapshot / "onnx"):
        folder.mkdir(exist_ok=True)
        assert own_tree(folder) == model
        (folder / "in").symlink_to(os.path.relpath(model / "blobs" / "hash", folder))
        (folder / "out").symlink_to(tmp_path / "outside")
        assert beside(folder, "in") == model / "blobs" / "hash"
        assert refusal(beside, folder, "out") == f"it is a link that leads out of {model}"
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "file").touch()
    (plain / "same").symlink_to("file")
    (plain / "out").symlink_to(tmp_path / "outside")
    (plain / "loop").symlink_to("loop")
    (plain / "gone").symlink_to("nowhere")
    assert own_tree(plain) == plain
    assert beside(plain, "file") == beside(plain, "same") == plain / "file"
    assert refusal(beside, plain, "out") == f"it is a link that leads out of {plain}"
    for name in ("loop", "gone", "absent"):
        with pytest.raises(OSError, match="plain"):
            beside(plain, name)


# ---------------------------------------------------------------------------------------------------------------- JSON
@pytest.mark.parametrize(
    "value", [None, 1.5, -3, 'é名\\ " [', [], {}, {"a": [1, {"b": "{[,"}], "": None}, 10**300, "\U0001f600"]
)
@pytest.mark.parametrize("how", [{}, {"ensure_ascii": False, "indent": 2}])
def test_values_are_those_of_json(value, how):
    assert parse_json(json.dumps(value, **how).encode()) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b'{"a": 1', "Expecting ',' delimiter"),
        (b"[1] 2", "Extra data"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff"),
        ("[1]".encode("utf-16"), "'utf-8' codec can't decode byte 0xff"),
        (b"\xef\xbb\xbf[1]", "Unexpected UTF-8 BOM"),
        (b'{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}', "it has the name c twice in one object"),
        (b"NaN", "NaN isn't a number in JSON"),
        (b"[-Infinity]", "-Infinity isn't a number in JSON"),
        (b"[1e400]", "no float64 can hold the number 1e400"),
        (b"[-1" + b"0" * 9_000 + b".5]", "no float64 can hold the number -1000000000"),
        (b"1" * 5_000, "Exceeds the limit (4300 digits)"),
        (b"[" * 201 + b"]" * 201, "its brackets are 201 deep; at most 200 are read"),
        (b'{"a":' * 10**5, "its brackets are 100,000 deep; at most 200 are read"),
        (b"[" + b"[]," * 10**6 + b"1]", "it holds about 2,000,002 values; at most 1,000,000 are read"),
        (b'"' + b'\\"' * 10**6, "Unterminated string"),
        (b'["\\ud83d\\ude00", "\\ud800"]', "it has half of a surrogate pair, which isn't a character"),
        (b'"\\udc00"', "it has half of a surrogate pair, which isn't a character"),
    ],
    ids=range(18),
)
def test_texts_that_are_refused(text, reason):
    assert reason in refusal(parse_json, text)


def test_limits_are_exact_and_strings_do_not_count():
    deep = b"[" * 200 + b"]" * 200
    assert parse_json(deep) is not None
    assert parse_json(b'["' + b"[{," * 10**6 + b'"]', values=3) == ["[{," * 10**6]
    assert parse_json(rb'{"\\": "\\\"[[,", "a": 1}', values=3) == {"\\": '\\"[[,', "a": 1}
    assert parse_json(b"[1, 2, 3]", values=4) == [1, 2, 3]
    assert "about 4 values" in refusal(parse_json, b"[1, 2, 3]", values=3)
    assert parse_json(b'["\\\\ud800", "\\u00e9"]') == ["\\ud800", "é"]


def test_what_a_caller_allows():
    assert parse_json(b"[Infinity, 1e400, 1]", finite=False) == [float("inf"), float("inf"), 1]
    assert parse_json(b'["-1", 2]', negative=False) == ["-1", 2]
    assert refusal(parse_json, b"[-0]", negative=False) == "it has a number with a minus sign"


def test_a_file_that_grows_is_refused(tmp_path, monkeypatch):
    (file := tmp_path / "file").write_bytes(b"ab")
    real = os.fstat

    def small(fd):
        found = list(real(fd))
        found[6] = 1
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", small)
    assert refusal(read_plain, file, 1) == "it has more than 1 bytes"
    assert isinstance(file, Path)
