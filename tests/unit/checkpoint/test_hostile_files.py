"""Files that somebody made to do harm: nothing hangs, runs, fills the memory or changes this process; texts are short."""

import contextlib
import dataclasses
import fcntl
import functools
import io
import json
import os
import pickle
import shutil
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.apps.cli import main as cli
from fsharding.apps.cli.config import check
from fsharding.apps.cli.metrics import plot_loss
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.resume import batches_seen
from fsharding.apps.data import open_data
from fsharding.base.calls import call_as
from fsharding.base.errors import CheckpointError, ConfigError, DataError
from fsharding.checkpoint import directory, manifest, reader, saving, torch_pickles
from fsharding.checkpoint.byte_ranges import Window
from fsharding.checkpoint.torch_pickles import Global, Made, Pairs, TorchFile, named, unpickled
from fsharding.foreign import foreign_weights, safetensors_files
from fsharding.interop import hf
from fsharding.testing import assert_bitwise_equal
from tests import checkpoints
from tests.checkpoints import reseal, small_draws
from tests.commands import read_metrics
from tests.helpers import refusal, slow

CONFIG = fs.models.DecoderConfig(vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12)


planned = functools.partial(checkpoints.planned, model=small_draws)


def a_state():
    return fs.init_state(small_draws, fs.adamw(1e-2), fs.random.key(3), planned())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ck.save(tmp_path / "ckpt" / "0", a_state())
    return tmp_path / "ckpt" / "0"


def model_of(folder: Path) -> Path:
    """A directory of Hugging Face."""
    layout = fs.plan_layout(fs.models.decoder(CONFIG), fs.make_mesh(device="cpu"))
    state = fs.init_state(fs.models.decoder(CONFIG), fs.adamw(1e-2), fs.random.key(0), layout)
    hf.save(folder, state, CONFIG, max_file_bytes=1200)
    return folder


def put_metadata(folder: Path, data: bytes) -> Path:
    (folder / ".metadata").write_bytes(data)
    reseal(folder)
    return folder


@contextlib.contextmanager
def at_most(allocated: int = 50 << 20, *, read: int | None = None):
    """At most so many bytes are allocated by Python at once, and as many read from files unless `read` is given."""
    tracemalloc.start()
    before = bytes_read()
    try:
        yield
        peak, taken = tracemalloc.get_traced_memory()[1], bytes_read() - before
    finally:
        tracemalloc.stop()
    assert peak < allocated and taken < (allocated if read is None else read), (peak, taken)


def bytes_read() -> int:
    """Bytes that this process has read from files with system calls; 0 where Linux doesn't count them."""
    path = Path("/proc/self/io")
    return int(path.read_text().split()[1]) if path.exists() else 0


# -------------------------------------------------------------------------------------------------------------- pickles
# What other readers do with larger ones of these: hash a tuple of references to tuples for ever, recurse until the
# process ends, or make room for what a length or an index claims. Small ones show the guards, with limits to match.
MAKERS = {"lists": b"]", "tuples": b")\x85", "marks": b"(", "dicts": b"}"}


@pytest.mark.parametrize("name", MAKERS)
def test_a_pickle_makes_as_many_objects_as_its_bytes_allow(name, monkeypatch):
    monkeypatch.setattr(torch_pickles, "_FREE", 4)
    code = MAKERS[name]
    most = 0
    while most + 1 <= 4 + (4 + (most + 1) * len(code)) // 5:
        most += 1
    unpickled(b"\x80\x04" + code * most + b"N.", Global)
    text = refusal(unpickled, b"\x80\x04" + code * (most + 1) + b"N.", Global, kind=ValueError)
    assert text == "its pickle has more lists, tuples and objects than state dicts of its size"


def test_keys_of_a_pickle_are_not_hashed():
    (pair,) = unpickled(b"\x80\x04}]K\x01s.", Global)
    assert pair == ([], 1)


def test_a_pickle_gets_no_room_for_what_it_only_claims():
    assert unpickled(b"\x80\x04K\x07r\xe8\x03\x00\x00j\xe8\x03\x00\x00.", Global) == 7  # an index is a key
    for code in (b"\x8c\x02", b"X\x02\0\0\0", b"\x8d\x02" + bytes(7), b"C\x02", b"B\x02\0\0\0", b"\x8e\x02" + bytes(7)):
        assert "its pickle is broken at byte" in refusal(unpickled, b"\x80\x04" + code + b"a", Global, kind=ValueError)


def test_a_refused_checkpoint_changes_nothing(saved, tmp_path):
    text = refusal(ck.load, put_metadata(saved, b"\x80\x04ctorch\nSize\nNb."), planned())
    assert "its pickle sets attributes of torch.Size" in text
    for call in (
        lambda: ck.load_leaves(saved, "params"),
        lambda: fs.foreign.export(saved, saved.parent / "out", "torch"),
        lambda: ck.reshard_checkpoint(saved, saved.parent / "out", {"dp": 2}),
    ):
        assert "its .metadata does not fit its manifest" in refusal(call)
    assert ck.inspect(saved).damaged
    (saved / "manifest.json").unlink()
    assert "its .metadata does not describe what is there" in refusal(fs.foreign.open_weights, saved)
    ck.save(tmp_path / "after", a_state())
    assert_bitwise_equal(ck.load(tmp_path / "after", planned()), a_state())


def test_what_a_file_holds_is_as_much_as_it_writes_and_not_too_deep(tmp_path, monkeypatch):
    inner: object = {"a": torch.ones(1)}
    for _ in range(3):
        inner = {"a": inner, "b": inner}  # 1 + 2 + 4 + 8 dicts, 8 tensors
    torch.save(inner, tmp_path / "weights")
    with zipfile.ZipFile(tmp_path / "weights") as archive:
        size = len(archive.read("weights/data.pkl"))
    for most, depth, fits in ((23, 4, True), (22, 4, False), (23, 3, False)):
        monkeypatch.setattr(foreign_weights, "_FREE_VALUES", most - size)
        monkeypatch.setattr(foreign_weights, "_DEPTH", depth)
        if fits:
            assert len(fs.foreign.open_weights(tmp_path / "weights").leaves) == 8
        else:
            text = refusal(fs.foreign.open_weights, tmp_path / "weights")
            assert "its values are nested too deeply, or too many for its size" in text


def test_pickles_are_read_as_data():
    value = {"a": (1, -2, 2.5, None, True), 3: [b"x", "y" * 300, 2**40, -(2**70)], "c": {"d": [{}]}}
    found = unpickled(pickle.dumps(value, protocol=4), Global)
    assert type(found) is Pairs and [key for key, _ in found] == ["a", 3, "c"]
    assert found[0][1] == value["a"] and found[1][1] == value[3]
    assert named(found[2][1])["d"] == [Pairs()]
    for protocol in (2, 3, 4, 5):
        made = unpickled(pickle.dumps(Path("a") / "b", protocol=protocol), Global)
        assert isinstance(made, Made) and str(made.kind).endswith("PosixPath") and made.args == ("a", "b")
    assert "no table of names" in refusal(named, found, kind=ValueError)
    assert "one name twice" in refusal(named, Pairs([("a", 1), ("a", 2)]), kind=ValueError)


def test_buffers_and_parameters_with_attributes_are_tensors(tmp_path):
    parameter = torch.nn.Parameter(torch.arange(2.0))
    parameter.note = "a"
    torch.save({"b": torch.nn.Buffer(torch.arange(3.0)), "p": parameter, "s": torch.Size([1])}, tmp_path / "weights")
    weights = fs.foreign.open_weights(tmp_path / "weights")
    assert [*weights.leaves] == ["b", "p"] and weights.others == ("s",)
    weights.read("b", ((1, 3),), out := torch.empty(2))
    assert out.tolist() == [1.0, 2.0]


def test_chunks_that_overlap_are_refused(saved):
    found = pickle.loads((saved / ".metadata").read_bytes())
    (chunk,) = found.state_dict_metadata["params.table"].chunks
    index = next(i for i in found.storage_data if i.fqn == "params.table")
    halves = [(torch.Size([0, 0]), torch.Size([4, 3])), (torch.Size([1, 0]), torch.Size([3, 3]))]
    found.state_dict_metadata["params.table"].chunks[:] = [type(chunk)(*half) for half in halves]
    for offset, _ in halves:
        found.storage_data[type(index)("params.table", offset)] = found.storage_data[index]
    text = refusal(ck.load, put_metadata(saved, pickle.dumps(found)), planned())
    assert "params.table: its chunks overlap" in text


# ---------------------------------------------------------------------------------------------------------- safetensors
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


BAD_HEADERS = {
    "overlap": (raw({"a": ENTRY, "b": ENTRY}), "b: begins at byte 0 of the tensors, and overlaps the one before it"),
    "gap": (raw({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, bytes(20)), "b: begins at byte 12 of the tensors, and leaves a gap before it"),
    "first gap": (raw({"a": ENTRY | {"data_offsets": [8, 16]}}, bytes(16)), "a: begins at byte 8 of the tensors, and leaves a gap before it"),
    "trailing": (raw({"a": ENTRY}, bytes(9)), "it has 1 bytes after the last tensor"),
    "cut": (raw({"a": ENTRY}, bytes(7)), " of "),
    "twice": (raw(b'{"a":%s,"a":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}' % json.dumps(ENTRY).encode()), "it has the name a twice in one object"),
    "float shape": (raw({"a": ENTRY | {"shape": [2.0]}}), "a: its shape isn't valid"),
    "huge shape": (raw(b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,8]}}'), "no float64 can hold the number 1e400"),
    "wide shape": (raw({"a": ENTRY | {"shape": [2**63, 2**63]}}), "a: its shape isn't valid"),
    "negative": (raw({"a": ENTRY | {"shape": [-2]}}), "it has a number with a minus sign"),
    "minus zero": (raw(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}'), "it has a number with a minus sign"),
    "true": (raw({"a": ENTRY | {"shape": [2, True]}}), "a: its shape isn't valid"),
    "three offsets": (raw({"a": ENTRY | {"data_offsets": [0, 8, 8]}}), "a: its data_offsets aren't valid"),
    "float offsets": (raw({"a": ENTRY | {"data_offsets": [0, 8.0]}}), "a: its data_offsets aren't valid"),
    "no offsets": (raw({"a": {"dtype": "F32", "shape": [2]}}), "a: isn't an object with dtype, shape and data_offsets"),
    "list": (raw({"a": [1]}), "a: isn't an object with dtype, shape and data_offsets"),
    "notes of numbers": (raw({"a": ENTRY, "__metadata__": {"n": 1}}), "its __metadata__ isn't an object of strings"),
    "list of notes": (raw({"a": ENTRY, "__metadata__": ["n"]}), "its __metadata__ isn't an object of strings"),
    "deep": (raw(b'{"a":' * 201), "its brackets are 201 deep; at most 200 are read"),
    "surrogate": (raw(b'{"\\ud800":%s}' % json.dumps(ENTRY).encode()), "it has half of a surrogate pair"),
    "no JSON": (raw(b'{"a":'), "its header isn't JSON: Expecting value"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_headers_are_refused_as_safetensors_refuses_them(name, tmp_path):
    data, reason = BAD_HEADERS[name]
    (tmp_path / "weights").write_bytes(data)
    with at_most():
        assert reason in refusal(fs.foreign.open_weights, tmp_path / "weights")
    if name in ("wide shape", "deep"):  # torch cannot make such a tensor; and its own limit of depth is another
        return
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load(data)


@pytest.mark.parametrize("spaces", [640, 379, 123, 8 * 97])
def test_headers_of_any_length_are_headers(spaces, tmp_path):
    text = json.dumps(
        {"a": ENTRY, "z": ENTRY | {"shape": [0, 5], "data_offsets": [8, 8]}, "__metadata__": None}
    ).encode()
    data = raw(text + b" " * (spaces - len(text)) if spaces > len(text) else text)
    (tmp_path / "weights").write_bytes(data)
    assert {*safetensors.torch.load(data)} == {*fs.foreign.open_weights(tmp_path / "weights").leaves} == {"a", "z"}


class Counted(io.FileIO):
    """A file that counts the bytes that are read."""

    count = 0

    def read(self, size=-1):
        data = super().read(size)
        self.count += len(data)
        return data


def test_a_long_header_is_refused_before_it_is_read(tmp_path, monkeypatch):
    data = raw({"a": ENTRY})
    (tmp_path / "weights").write_bytes(data)
    for most, fits in ((len(data) - 16, True), (len(data) - 17, False)):
        monkeypatch.setattr(safetensors_files, "LARGEST", most)
        with Counted(tmp_path / "weights") as file:
            if fits:
                assert [*safetensors_files.header_of(file).tensors] == ["a"] and file.count == len(data) - 8
            else:
                text = refusal(safetensors_files.header_of, file, kind=ValueError)
                assert f"its header has {most + 1:,} bytes; the format allows {most:,}" in text and file.count == 8
    monkeypatch.undo()
    assert safetensors_files.LARGEST == 100_000_000


def test_of_a_zip_no_more_is_read_than_the_limit(tmp_path):
    torch.save({"w": torch.ones(2)}, file := tmp_path / "weights")
    data = file.read_bytes()
    largest, total = 0, 0

    def fetch(start, stop):
        nonlocal largest, total
        largest, total = max(largest, stop - start), total + stop - start
        return data[start:stop]

    assert dict(foreign_weights._entries(TorchFile(Window(fetch, len(data)))))["w"].shape == (2,)
    most = largest
    assert dict(foreign_weights._entries(TorchFile(Window(fetch, len(data), most))))["w"].shape == (2,)
    largest = total = 0
    text = refusal(TorchFile, Window(fetch, len(data), most - 1), kind=ValueError)
    assert f"{most:,} bytes; at most {most - 1:,} are read" in text and largest < most


def test_metadata_above_the_limit_are_not_read(saved, monkeypatch):
    (saved / "manifest.json").unlink()
    size = (saved / ".metadata").stat().st_size
    monkeypatch.setattr(reader, "LARGEST", size)
    assert "params.table" in fs.foreign.open_weights(saved).leaves
    monkeypatch.setattr(reader, "LARGEST", size - 1)
    monkeypatch.setattr(reader, "_read_block", None)  # which reads
    text = refusal(fs.foreign.open_weights, saved)
    assert f".metadata has {size:,} bytes; at most {size - 1:,} are read" in text


# ---------------------------------------------------------------------------------------------------------------- FIFOs
def test_nothing_waits_for_a_fifo(saved, tmp_path):
    model = model_of(tmp_path / "model")
    layout = fs.plan_layout(fs.models.decoder(CONFIG), fs.make_mesh(device="cpu"))
    part = sorted(model.glob("*.safetensors"))[0].name
    target = tmp_path / "out"
    calls = {
        model / "config.json": [lambda: hf.config_of(model), lambda: hf.load(model, layout), lambda: hf.config_of(model / "config.json")],
        model / "model.safetensors.index.json": [lambda: hf.load(model, layout), lambda: fs.foreign.open_weights(model)],
        model / part: [lambda: hf.load(model, layout), lambda: fs.foreign.load_weights(model, layout), lambda: fs.foreign.open_weights(model / part)],
        saved / "manifest.json": [lambda: ck.load(saved, planned()), lambda: ck.metadata(saved)],
        saved / ".metadata": [
            lambda: ck.load(saved, planned()), lambda: fs.foreign.export(saved, target, "torch"),
            lambda: ck.reshard_checkpoint(saved, target, {"dp": 2}),
        ],
        saved / "__0_0.distcp": [lambda: ck.load(saved, planned()), lambda: fs.foreign.export(saved, target, "dcp")],
    }  # fmt: skip
    for file, tried in calls.items():
        kept = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        for call in tried:
            assert "isn't a plain file" in refusal(call), file
        if file.parent == saved:
            assert ck.inspect(saved).damaged
            assert ck.latest(saved.parent) is None
        file.unlink()
        file.write_bytes(kept)
    assert_bitwise_equal(ck.load(saved, planned()), a_state())
    os.mkfifo(fifo := tmp_path / "a.bin")
    assert f"fs.data.open_data cannot open {fifo}: it isn't a plain file.\n" in refusal(
        open_data, str(fifo), batch_size=1, seq_len=2
    )
    os.mkfifo(tmp_path / "a.txt")
    assert "isn't a plain file" in refusal(open_data, str(tmp_path / "a.txt"), batch_size=1, seq_len=2)
    (tmp_path / "b.bin").write_bytes(bytes(64))
    os.mkfifo(tmp_path / "b.bin.json")
    assert "isn't a plain file" in refusal(open_data, str(tmp_path / "b.bin"), batch_size=1, seq_len=2, kind=DataError)
    for read in (read_metrics, lambda path: plot_loss(path, tmp_path / "a.png")):
        assert "isn't a plain file" in refusal(read, fifo, kind=ConfigError)
    (foreign := tmp_path / "foreign").mkdir()
    os.mkfifo(foreign / ".metadata")
    assert "isn't a plain file" in refusal(fs.foreign.open_weights, foreign)
    os.mkfifo(foreign / "metadata.json")
    assert "finds no checkpoint" in refusal(ck.load, foreign, planned())


# ---------------------------------------------------------------------------------------------------------------- links
def in_the_cache(model: Path, top: Path) -> Path:
    """A snapshot of the Hub's cache: every file is a link to a blob."""
    snapshot = top / "models--org--name" / "snapshots" / "0f0f"
    (blobs := snapshot.parents[1] / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, blobs / f"{number:064}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064}")
    return snapshot


@pytest.mark.parametrize("files", ["several", "one"])
def test_a_snapshot_of_the_hub_is_read_through_its_links(files, tmp_path):
    model = model_of(tmp_path / "model")
    if files == "one":
        tensors = {k: x for file in model.glob("*.safetensors") for k, x in safetensors.torch.load_file(file).items()}
        for file in model.glob("model*"):
            file.unlink()
        safetensors.torch.save_file(tensors, model / "model.safetensors")
    snapshot = in_the_cache(model, tmp_path)
    layout = fs.plan_layout(fs.models.decoder(hf.config_of(snapshot)), fs.make_mesh(device="cpu"))
    want = hf.load(model, layout)
    assert_bitwise_equal(hf.load(snapshot, layout), want)
    paths = [snapshot, next(snapshot.glob("model.safetensors*"))]
    for path in paths:
        assert fs.foreign.open_weights(path).leaves == fs.foreign.open_weights(model).leaves
    (tmp_path / "link").symlink_to(snapshot)
    assert_bitwise_equal(hf.load(tmp_path / "link", layout), want)
    name = hf.names_of(CONFIG)["embed.table"]
    like = {"t": torch.empty(16, 8)}
    for path in paths:
        found = fs.foreign.load_weights(path, like, {"t": name}, extra="ignore")
        assert torch.equal(found["t"], want["embed"]["table"].to_local())


def test_links_that_lead_out_are_refused(tmp_path):
    model = model_of(tmp_path / "model")
    snapshot = in_the_cache(model, tmp_path)
    layout = fs.plan_layout(fs.models.decoder(CONFIG), fs.make_mesh(device="cpu"))
    part = sorted(snapshot.glob("*.safetensors"))[0]
    for link in (part, snapshot / "model.safetensors.index.json", snapshot / "config.json"):
        kept = os.readlink(link)
        link.unlink()
        link.symlink_to(model / link.name)
        assert f"link that leads out of {snapshot.parents[1]}" in refusal(hf.load, snapshot, layout)
        if link.name != "config.json":
            text = refusal(fs.foreign.load_weights, snapshot, layout, hf.names_of(CONFIG))
            assert f"link that leads out of {snapshot.parents[1]}" in text
            assert text.startswith("fs.foreign.load_weights cannot read ")
        link.unlink()
        link.symlink_to(kept)
    plain = tmp_path / "plain"
    shutil.copytree(snapshot, plain, symlinks=True)
    for link in plain.iterdir():
        link.unlink()
        link.symlink_to(model / link.name)
    assert f"it is a link that leads out of {plain}" in refusal(hf.load, plain, layout)


# ---------------------------------------------------------------------------------------------------------------- texts
def test_ten_thousand_extra_tensors_are_ten_and_a_count(tmp_path):
    tensors = {f"{'x' * 2_000}{i}": torch.zeros(0) for i in range(10_000)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    text = refusal(fs.foreign.load_weights, tmp_path, {"w": torch.ones(2)})
    assert len(text) < 20_000 and len(text.splitlines()) == 13
    assert "its tensors do not match." in text and "\n  and 9,991 more\n" in text


def test_a_config_of_very_many_layers_is_refused_at_once(tmp_path):
    model = model_of(tmp_path / "model")
    entries = json.loads((model / "config.json").read_text())
    for layers, reason in ((10**6, "num_hidden_layers is 1,000,000: at most 10,000"), (10**4, None)):
        (model / "config.json").write_text(json.dumps(entries | {"num_hidden_layers": layers}))
        with at_most(100 << 20):
            if reason is not None:
                assert reason in refusal(hf.config_of, model)
                continue
            layout = fs.plan_layout(fs.models.decoder(hf.config_of(model)), fs.AbstractMesh(("dp",), (1,)))
            layout = layout.with_mesh(fs.make_mesh(device="cpu"))
            text = refusal(hf.load, model, layout)
    assert len(text) < 5_000 and "blocks.wq has more tensors than the 21 of the files" in text


EVIL = "w\x1b]0;owned\x07\nparams.fine: all is well\x1b[31m"
SHOWN = r"w\x1b]0;owned\x07\nparams.fine: all is well\x1b[31m"


def test_names_cannot_act_on_a_terminal(saved, tmp_path, capsys):
    safetensors.torch.save_file({EVIL: torch.zeros(2)}, tmp_path / "model.safetensors")
    text = refusal(fs.foreign.load_weights, tmp_path / "model.safetensors", {"w": torch.ones(2)})
    assert "\x1b" not in text and "\x07" not in text and "\nparams.fine" not in text
    state = a_state()
    ck.save(tmp_path / "named", state.replace(opt_state={EVIL: torch.zeros(3)}))
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", str(tmp_path / "named")])
    out = capsys.readouterr().out
    assert not ended.value.code and f"opt_state.{SHOWN}" in out and "\x1b" not in out


# -------------------------------------------------------------------------------------------------------------- inspect
def shown(capsys, path: Path) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", str(path)])
    found = capsys.readouterr()
    return int(ended.value.code or 0), found.out + found.err


def evil_metadata(folder: Path) -> None:
    put_metadata(folder, b"cos\nsystem\n.")


def evil_record(folder: Path) -> None:
    found = pickle.loads((folder / ".metadata").read_bytes())
    info = next(info for index, info in found.storage_data.items() if index.fqn == "params.table")
    data, record = (folder / info.relative_path).read_bytes(), io.BytesIO()
    torch.save({"a": torch.ones(2)}, record)
    info.offset, info.length = len(data), len(record.getvalue())
    (folder / info.relative_path).write_bytes(data + record.getvalue())
    put_metadata(folder, pickle.dumps(found))


def outside(folder: Path) -> None:
    found = pickle.loads((folder / ".metadata").read_bytes())
    for info in found.storage_data.values():
        info.relative_path = "../../x"
    put_metadata(folder, pickle.dumps(found))


def other_step(folder: Path) -> None:
    reseal(folder, step=13)


@pytest.mark.parametrize("damage", [evil_metadata, evil_record, outside, other_step])
def test_inspect_refuses_what_load_refuses(damage, saved, capsys):
    assert shown(capsys, saved)[0] == 0
    damage(saved)
    text = refusal(ck.load, saved, planned())
    status, out = shown(capsys, saved)
    assert status == 1 and out.startswith(f"{saved}: damaged\n  damaged: ")
    if damage is not other_step:
        assert text.splitlines()[0].replace("fs.checkpoint.load", "fs.checkpoint.inspect") in out
    else:
        assert "  damaged: manifest.json: it says step 13, the files say step 0" in out


def test_inspect_says_what_a_directory_is_instead(saved, tmp_path, capsys):
    model = model_of(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "fsdp2", no_dist=True)
    (run := tmp_path / "run").mkdir()
    shutil.copytree(saved.parent, run / "ckpt")
    (run / "metrics.jsonl").touch()
    (empty := tmp_path / "new").mkdir()
    (empty / "metrics.jsonl").touch()
    hugging = "Read its weights with fs.hf.load(path, layout), or fs.foreign.load_weights(path, layout, names)."
    for path, what, mend in (
        (model, "it is a directory of Hugging Face", hugging),
        (
            tmp_path / "fsdp2",
            "torch.distributed.checkpoint wrote it, as FSDP2 does, or its save was never finished: it has no manifest.json",
            "Read the tensors of such a directory with fs.foreign.load_weights(path, layout, names).",
        ),
        (run, "it is the directory of a run", f"Pass one of its checkpoints, such as the newest: {run}/ckpt/0"),
        (run / "ckpt", "it is a directory of checkpoints", f"Pass one of its checkpoints, such as the newest: {run}/ckpt/0"),
        (empty, "it is the directory of a run that has no complete checkpoint", "Pass the directory of a different run."),
    ):  # fmt: skip
        status, text = shown(capsys, path)
        if path in (run, run / "ckpt"):
            assert status == 0 and text.startswith(f"{path}: 1 checkpoint\n") and text.endswith(f"{run}/ckpt/0\n")
        else:
            assert (status, text) == (
                2, f"CheckpointError: fsharding inspect: fs.checkpoint.inspect finds no checkpoint at {path}: {what}.\n{mend}\n"
            )  # fmt: skip
        assert refusal(ck.load, path, planned()) == f"fs.checkpoint.load finds no checkpoint at {path}: {what}.\n{mend}"


# ----------------------------------------------------------------------------------------------------- names of callers
def test_refusals_name_the_function_that_was_called(saved, tmp_path):
    evil_metadata(saved)
    layout = planned()
    for name, call in {
        "checkpoint.load": lambda: ck.load(saved, layout),
        "checkpoint.load_leaves": lambda: ck.load_leaves(saved, "params"),
        "foreign.export": lambda: fs.foreign.export(saved, tmp_path / "out", "torch"),
        "checkpoint.reshard_checkpoint": lambda: ck.reshard_checkpoint(saved, tmp_path / "out", {"dp": 2}),
    }.items():
        assert refusal(call).startswith(f"fs.{name} refuses to unpickle os.system")
    (saved / "__0_0.distcp").unlink()
    for name, call in {
        "checkpoint.load_leaves": lambda: ck.load_leaves(saved, "params"),
        "checkpoint.load": lambda: ck.load(saved, layout),
    }.items():
        assert refusal(call).startswith(f"fs.{name} refuses ")
    (saved / "manifest.json").unlink()
    for name, call in {
        "open_weights": lambda: fs.foreign.open_weights(saved),
        "load_weights": lambda: fs.foreign.load_weights(saved, layout),
    }.items():
        assert refusal(call).startswith(f"fs.foreign.{name} refuses to unpickle os.system")
    assert refusal(fs.foreign.load_weights, tmp_path / "no", layout).startswith("fs.foreign.load_weights cannot read ")


def test_errors_of_a_file_that_was_cut_off_since_begin_with_the_call_that_reads_it(tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(4)}, file)
    weights = fs.foreign.open_weights(file)
    os.truncate(file, file.stat().st_size - 4)
    out = torch.empty(4)
    texts = [refusal(weights.read, "w", ((0, 4),), out)]
    texts.append(refusal(call_as, "fs.hf.load", weights.read, "w", ((0, 4),), out))
    for text, caller in zip(texts, ("fs.foreign.open_weights", "fs.hf.load"), strict=True):
        assert text.startswith(f"{caller} cannot read {file}.")


class Code:
    def __reduce__(self):
        return print, ("code ran while loading",)


def test_no_text_tells_anybody_to_unpickle_it_anyway(tmp_path):
    torch.save({"w": Code()}, tmp_path / "weights")
    assert refusal(fs.foreign.open_weights, tmp_path / "weights") == (
        f"fs.foreign.open_weights cannot read {tmp_path}/weights.\n"
        "  it names builtins.print, which no state dict needs; nothing of it was run\n"
        "Pass a torch.save file of a state dict, a directory of torch DCP, or safetensors."
    )


# -------------------------------------------------------------------------------------------------------------- configs
ENTRIES = hf.config_json(CONFIG)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan: a number from 0 to 1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5': a number from 0 to 1"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf: a number from 0 to 1"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta is -1.0: a number from 1 to 1e+15"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf: a number from 1 to 1e+15"),
        ({"rope_parameters": [1]}, "rope_type is [1]: types are default, llama3, yarn"),
        ({"rope_parameters": YARN | {"rope_type": {"a": 1}}}, "the rotary positions differ between rope_type"),
        ({"rope_parameters": YARN | {"rope_type": []}}, "rope_type is []: types are default, llama3, yarn"),
        ({"rope_parameters": YARN | {"factor": 1e308}}, "factor of the rotary positions is 1e+308: a number"),
        ({"rope_parameters": YARN | {"factor": 1e9}}, "factor of the rotary positions is 1000000000.0: at most 1,000,000"),
        ({"rope_parameters": YARN | {"beta_slow": "x"}}, "beta_slow of the rotary positions is 'x': a number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000: at most 10,000"),
        ({"vocab_size": 10**30}, "vocab_size is 1,000,000,000,000,000,000,000,000,000,000: at most 16,777,216"),
        ({"num_hidden_layers": 10**4, "hidden_size": 2**24, "intermediate_size": 2**24, "num_attention_heads": 2**20}, "one leaf would have "),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1: an integer above 0"),
        ({"num_key_value_heads": "1"}, "num_key_value_heads is '1': an integer above 0"),
        ({"head_dim": 4.0}, "head_dim is 4.0: an integer above 0"),
        ({"layer_types": 3}, "layer_types is 3: models.decoder does not support it"),
        ({"layer_types": [["full_attention"]]}, "layer_types is [['full_attention']]: models.decoder does not support it"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
    ],
)  # fmt: skip
def test_configs_that_no_model_has(changes, row):
    assert f"\n  {row}" in refusal(hf.config_of, ENTRIES | changes, kind=ConfigError)


@pytest.mark.parametrize(
    ("data", "row"),
    [
        (b'{"a":' * 201, "its brackets are 201 deep; at most 200 are read"),
        (b'{"a": 1, "a": 2}', "it has the name a twice in one object"),
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (None, "it has 16,777,217 bytes; at most 16,777,216 are read"),
    ],
)
def test_config_files_that_are_none(data, row, tmp_path):
    sparse(tmp_path / "config.json", (1 << 24) + 1) if data is None else (tmp_path / "config.json").write_bytes(data)
    with at_most():
        assert refusal(hf.config_of, tmp_path) == (
            f"fs.hf.config_of cannot read {tmp_path}/config.json.\n  {row}\n"
            "Pass a directory that has a config.json, as save_pretrained of transformers writes it."
        )


def test_a_decoder_refuses_numbers_that_compute_nothing():
    text = refusal(fs.models.DecoderConfig, eps=float("nan"), rope_base=-1.0, kind=ConfigError)
    assert "  eps=nan: from 0 to 1\n  rope_base=-1.0: at least 1, and finite" in text


# ------------------------------------------------------------------------------------------------------------- manifests
@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("tree", "params.table", "shape"), [7, 3.0], "not a shape or spec: params.table"),
        (("tree", "params.table", "shape"), [2**62, 2**62], "not a shape or spec: params.table"),
        (("tree", "params.table", "spec"), 3, "not a shape or spec: params.table"),
        (("tree", "params.table", "dtype"), ["float32"], "not a file name or dtype"),
        (("files", ".metadata", "bytes"), -1, "checksums of"),
        (("files", ".metadata", "bytes"), "1", "its size or checksums have wrong types"),
        (("files", ".metadata", "sha256"), [3], "its size or checksums have wrong types"),
        (("files", ".metadata", "block"), 1 << 40, "checksums of"),
        (("layout", "mesh"), ["dp"], "AttributeError"),
        (("layout", "mesh"), {"dp": "2"}, "the mesh of its layout is invalid"),
        (("layout", "frozen"), {"a": 1}, "the frozen leaves of its layout are invalid"),
        (("layout",), 3, "AttributeError"),
        (("step",), 1.5, "its step is a float, not an int"),
    ],
)  # fmt: skip
def test_manifests_that_somebody_sealed_again(saved, path, value, reason):
    data = json.loads((saved / "manifest.json").read_text())
    data.pop("sha256")
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    (saved / "manifest.json").write_text(json.dumps(data | {"sha256": manifest._seal(data)}))
    for call in (
        lambda: ck.load(saved, planned()),
        lambda: ck.metadata(saved),
        lambda: fs.foreign.export(saved, saved / "o", "dcp"),
    ):
        text = refusal(call, kind=CheckpointError)
        assert "its manifest.json is damaged" in text and reason in text
    assert ck.inspect(saved).damaged


def test_layouts_of_manifests_that_somebody_sealed_again(saved):
    found = ck.metadata(saved)
    params = found.layout["params"]
    for shape in ([2**62, 3], [7, 3.0], [-1], "ab"):
        plain = {**found.layout, "params": {**params, "table": {**params["table"], "shape": shape}}}
        text = refusal(ck.layout_of, dataclasses.replace(found, layout=plain), fs.AbstractMesh(("dp",), (2,)))
        assert text == "fs.checkpoint.layout_of finds no layout in the manifest.\n  ValueError: not a shape: table"


def test_what_cannot_be_read_again_is_not_saved(tmp_path):
    extra: list = []
    for _ in range(250):
        extra = [extra]
    text = refusal(ck.save, tmp_path / "a", a_state(), extra=extra)
    assert "cannot write `extra` as JSON.\n  its brackets are " in text


@pytest.mark.parametrize(
    ("extra", "batches"),
    [(None, 0), (3, 0), ([], 0), ({"batches": 7}, 7), ({"batches": "7"}, None), ({"batches": -1}, None)],
)
def test_a_run_goes_on_only_where_a_run_was(extra, batches, tmp_path):
    ck.save(tmp_path / "a", a_state(), extra=extra)
    if batches is not None:
        assert batches_seen(tmp_path / "a") == batches
        return
    assert refusal(batches_seen, tmp_path / "a", kind=CheckpointError) == (
        f"fsharding train --resume cannot go on from {tmp_path}/a: it does not say how many batches its run had seen.\n"
        f"  batches: {extra['batches']!r}\nfs.checkpoint.load reads it; --resume takes what fsharding train has saved."
    )


def test_rows_of_metrics_end_where_one_is_none(tmp_path):
    file, good = tmp_path / "metrics.jsonl", b'{"step": 1, "loss": 2.5, "lr": null}\n'
    for bad in (b'{"step": 1e400}', b'{"step": true}', b'{"step": 2, "loss": NaN}', b'{"step": 2, "loss": "x"}', b'{"step": 2, "loss": [1]}',
                b'{"step": 2', b"[" * 201, b'{"step": 2, "step": 3}', b"\xff", b'{"step": %d}' % 10**30, b"3"):  # fmt: skip
        file.write_bytes(good + bad + b"\n" + good)
        assert read_metrics(file) == [{"step": 1, "loss": 2.5, "lr": None}]
    assert read_metrics(tmp_path / "absent") == []


# ------------------------------------------------------------------------------------------------------- sizes and names
def unchanged(folder: Path) -> list[str]:
    """What is in a directory, and hidden in it: the same before and after a call that was refused."""
    return sorted(os.listdir(folder))


def sparse(file: Path, size: int) -> Path:
    """A file of zeros that takes no place."""
    file.touch()
    os.truncate(file, size)
    return file


@slow
@pytest.mark.parametrize("verb", ["export", "inspect", "reshard"])
def test_verbs_take_no_fifo_and_no_device(verb, saved, tmp_path, capsys):
    os.mkfifo(fifo := tmp_path / "fifo")
    (tmp_path / "deep").write_bytes(b'{"a":' * 201)
    sources = [fifo, Path("/dev/zero"), sparse(tmp_path / "sparse", 1 << 40), tmp_path / ("x" * 300)]
    more = {"export": ["out", "--format", "torch"], "inspect": [], "reshard": ["out", "--mesh", "dp=2"]}[verb]
    calls = [[verb, str(source), *more] for source in sources]
    if verb == "export":
        tables = [fifo, "/dev/zero", tmp_path / "sparse", tmp_path / "deep", tmp_path / ("x" * 300), tmp_path]
        calls += [[verb, str(saved), *more, "--names", str(table)] for table in tables]
    if verb != "inspect":
        calls.append([verb, str(saved), "x" * 250, *more[1:]])
    before = unchanged(tmp_path)
    with contextlib.chdir(tmp_path):
        for call in calls:
            with at_most(), pytest.raises(SystemExit) as ended:
                cli.main(call)
            error = capsys.readouterr().err
            assert ended.value.code == 2 and "Error: f" in error and len(error) < 5_000, call
    assert unchanged(tmp_path) == before and unchanged(saved.parent) == ["0"]


@slow
@pytest.mark.parametrize("name", ["x" * 300, "x/" * 5_000, "a\0b"], ids=["name", "path", "null"])
def test_paths_that_no_system_has_are_errors_of_ours(name, saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    decoder = fs.models.decoder(CONFIG)
    layout = fs.plan_layout(decoder, fs.make_mesh(device="cpu"))
    state = fs.init_state(decoder, fs.adamw(1e-2), fs.random.key(0), layout)
    before = unchanged(tmp_path)
    for call in (
        lambda: ck.load(name, layout),
        lambda: ck.load_leaves(name, "params"),
        lambda: fs.foreign.load_weights(name, layout),
        lambda: fs.foreign.open_weights(name),
        lambda: ck.inspect(name),
        lambda: ck.metadata(name),
        lambda: ck.latest(name),
        lambda: ck.save(name, state),
        lambda: ck.save_async(name, state).wait(),
        lambda: fs.foreign.export(name, "out", "torch"),
        lambda: fs.foreign.export(saved, name, "dcp"),
        lambda: fs.foreign.export(saved, name, "torch"),
        lambda: ck.reshard_checkpoint(name, "out", {"dp": 2}),
        lambda: ck.reshard_checkpoint(saved, name, {"dp": 2}),
        lambda: ck.Checkpointer(name, background=False).save(state),
        lambda: hf.load(name, layout),
        lambda: hf.config_of(name),
        lambda: hf.save(name, state, CONFIG),
    ):
        with at_most():
            text = refusal(call)
        assert any(why in text for why in ("too long", "null byte", "null character", "no such")), text
        assert len(text) < 5_000
    assert unchanged(tmp_path) == before


def test_paths_of_leaves_may_be_long(tmp_path):
    long = "l" * 10_000
    ck.save(tmp_path / "a", a_state().replace(opt_state={long: torch.arange(3.0)}))
    with at_most():
        assert len(str(ck.inspect(tmp_path / "a"))) < 10_000
        assert ck.load_leaves(tmp_path / "a", f"opt_state.{long}")[f"opt_state.{long}"].tolist() == [0.0, 1.0, 2.0]
        assert len(refusal(ck.load_leaves, tmp_path / "a", long)) < 5_000
        assert len(refusal(ck.load, tmp_path / "a", planned(), opt=fs.adamw(1e-2))) < 5_000
    fs.foreign.export(tmp_path / "a", tmp_path / "out", "safetensors", what="all")
    assert f"opt_state.{long}" in fs.foreign.open_weights(tmp_path / "out").leaves


@pytest.mark.parametrize(
    "paths",
    [["params"] * 10**6, [f"params.table{i}" for i in range(10**5)], "ab" * (5 << 20), "." * 10**6],
    ids=["often", "unknown", "long", "dots"],
)
def test_large_requests_for_leaves_take_no_time(paths, saved):
    with at_most(100 << 20):
        if paths[0] == "params":
            assert [*ck.load_leaves(saved, paths)] == ["params.blocks.w", "params.table"]
        else:
            assert len(refusal(ck.load_leaves, saved, paths)) < 10_000


def test_leaves_larger_than_the_memory_are_refused(saved):
    found = ck.metadata(saved)
    tree = found.tree | {"params.table": found.tree["params.table"]._replace(shape=(1 << 40, 3))}
    reseal(saved, tree=tree)
    with at_most():
        text = refusal(ck.load_leaves, saved, "params.table")
    assert text.startswith(f"fs.checkpoint.load_leaves cannot load 13,194,139,533,312 bytes of {saved}: this machine")


def test_a_large_extra_is_not_saved(saved, monkeypatch):
    assert saving._LARGEST_EXTRA == 16 << 20
    monkeypatch.setattr(saving, "_LARGEST_EXTRA", 1 << 20)
    with at_most(6 << 20):
        text = refusal(ck.save, saved, a_state(), extra={"notes": "x" * (1 << 20)}, kind=CheckpointError)
    assert "cannot write `extra`: it has 1,048,589 bytes as JSON; at most 1,048,576 are written." in text
    assert unchanged(saved.parent) == ["0"] and ck.metadata(saved).extra is None


def sealed(folder, extra):
    """Writes any `extra` into a manifest, with the checksum of all of it."""
    data = {**json.loads((folder / "manifest.json").read_text()), "extra": extra}
    del data["sha256"]
    (folder / "manifest.json").write_text(json.dumps({**data, "sha256": manifest._seal(data)}))


@pytest.mark.parametrize("call", [ck.metadata, lambda path: ck.load(path, planned())])
def test_a_manifest_of_300_mb_is_refused_by_its_size(saved, call):
    sparse(saved / "manifest.json", 300 << 20)
    with at_most():
        text = refusal(call, saved, kind=CheckpointError)
    others = sum(file.stat().st_size for file in saved.iterdir() if file.name != "manifest.json")
    assert f"manifest.json has 314,572,800 bytes; at most {(64 << 20) + others // 16384:,} are read" in text
    assert ck.latest(saved.parent) is None and ck.inspect(saved).damaged


def test_a_manifest_of_many_keys_is_refused_by_their_number(saved, monkeypatch):
    monkeypatch.setattr(manifest, "_MOST_VALUES", 1000)
    for keys, fits in ((998, True), (999, False)):
        (saved / "manifest.json").write_text("{" + ",".join(f'"{i}":0' for i in range(keys + 1)) + "}")
        text = refusal(ck.load, saved, planned(), kind=CheckpointError)
        assert ("it holds about 1,001 values; at most 1,000 are read" in text) is not fits


@pytest.mark.parametrize("extra", ["x" * (1 << 20), dict.fromkeys(map(str, range(20_000)), 0)], ids=["text", "keys"])
def test_a_manifest_at_its_limits_is_read_in_proportion(saved, extra, monkeypatch):
    sealed(saved, extra)
    data = (saved / "manifest.json").read_bytes()
    sizes = {"_MOST_BYTES": len(data), "_MOST_VALUES": manifest.values_of(data)}
    for name, size in sizes.items():
        monkeypatch.setattr(manifest, name, size)
    with at_most(20 << 20):
        assert ck.metadata(saved).step == 0
    for name, size in sizes.items():
        with monkeypatch.context() as patch:
            patch.setattr(manifest, name, size - 1)
            assert f"at most {size - 1:,} are read" in refusal(ck.metadata, saved, kind=CheckpointError)


def test_limits_of_a_manifest_grow_with_the_checkpoint():
    """A checkpoint of 8 TB has 2 million checksums of 68 bytes, and 500,000 leaves can have 5 values each."""
    for tensors, leaves in ((0, 10**5), (8 << 40, 5 * 10**5)):
        most_bytes, most_values = manifest.limits(tensors)
        checksums = tensors // manifest.BLOCK
        assert most_values > checksums + 5 * leaves and most_bytes > 68 * checksums + 100 * leaves
    assert manifest.limits(1 << 60) == (1 << 29, 10_000_000)


@pytest.mark.parametrize("save", [ck.save, lambda *args, **options: ck.save_async(*args, **options).wait()])
def test_a_manifest_that_no_load_would_read_is_not_written(saved, save, monkeypatch):
    before = (saved / "manifest.json").read_bytes()
    monkeypatch.setattr(manifest, "limits", lambda others: (64 << 20, 1000))
    text = refusal(save, saved, a_state(), extra=[1] * 1500, kind=CheckpointError)
    assert text.startswith("fs.checkpoint.save cannot write a manifest.json that no load would read.\n  it has 1,")
    assert " values; at most 1,000 are read for " in text
    assert unchanged(saved.parent) == ["0"] and (saved / "manifest.json").read_bytes() == before


def test_the_commit_of_a_save_refuses_a_manifest_that_no_load_would_read(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_MOST_VALUES", 1000)
    monkeypatch.setattr(manifest, "_MOST_BYTES", 10_000)
    with directory.partial_checkpoint(tmp_path / "a") as partial:
        for text in ("[" + "1," * 1000 + "1]", "x" * 10_001):
            with pytest.raises(CheckpointError, match="that no load would read"):
                directory.commit(tmp_path / "a", text, {})
        assert not list(partial.iterdir()) and not (tmp_path / "a").exists()


def test_metadata_of_holes_are_read_once(saved):
    sparse(saved / ".metadata", 0)
    sparse(saved / ".metadata", 64 << 20)
    reseal(saved)
    with at_most(120 << 20):
        assert "its pickle has the opcode 0x00" in refusal(ck.load, saved, planned())
    os.truncate(saved / ".metadata", 1 << 40)
    with at_most():
        assert ".metadata has 1,099,511,627,776 bytes, the manifest says" in refusal(ck.load, saved, planned())


def test_metrics_of_any_size_are_read_row_by_row(tmp_path):
    row = b'{"step": %d, "loss": 2.5, "grad_norm": null, "lr": 0.001, "tokens": 1024, "step_s": 0.125}\n'
    (file := tmp_path / "metrics.jsonl").write_bytes(b"".join(row % n for n in range(1, 20_001)))
    with at_most(40 << 20):
        plot_loss(file, tmp_path / "loss.png")
    file.write_bytes(row % 1 + b'"' + b"a" * (8 << 20))
    with at_most(2 << 20):
        assert len(read_metrics(file)) == 1
    with at_most(2 << 20):
        assert read_metrics(sparse(file, 1 << 40)) == [{**read_metrics(file)[0]}]


def test_a_resume_looks_at_the_metrics_before_a_rank_starts(tmp_path):
    config = TrainConfig(out=tmp_path, steps=1, batch=1, seq=8, plot=False, resume="newest")
    extra = {"preset": "tiny", "data": "", "batches": 0}
    ck.save(config.checkpoints / "0", a_state(), extra=extra)
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        make(config.metrics)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fsharding.apps.cli.config._check_resume", lambda *_: None)
            assert refusal(check, config, 1, kind=ConfigError) == (
                f"fsharding train cannot read {config.metrics}.\n  it isn't a plain file\nMove it away, or give another --out."
            )
        os.rmdir(config.metrics) if make is os.mkdir else os.unlink(config.metrics)


# --------------------------------------------------------------------------------------------- nothing is left behind
OUTPUTS = ["torch", "safetensors", "dcp", "reshard", "hf"]


def write_out(call: str, saved: Path, out: Path) -> None:
    if call == "reshard":
        ck.reshard_checkpoint(saved, out, {"dp": 2})
    elif call == "hf":
        layout = fs.plan_layout(fs.models.decoder(CONFIG), fs.make_mesh(device="cpu"))
        hf.save(out, fs.init_state(fs.models.decoder(CONFIG), fs.adamw(1e-2), fs.random.key(0), layout), CONFIG)
    else:
        fs.foreign.export(saved, out, call)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("a bug")])
@pytest.mark.parametrize("call", OUTPUTS)
def test_failed_exports_leave_no_directory_behind(call, error, saved, tmp_path, monkeypatch):
    """Whatever ends it when its data are being synced: the disk, Ctrl-C, or a defect."""
    before, out = unchanged(tmp_path), tmp_path / "out"

    def failing(fd):
        raise error

    monkeypatch.setattr(os, "fsync", failing)
    ours = isinstance(error, OSError) or (call == "hf" and isinstance(error, Exception))
    with pytest.raises(CheckpointError if ours else type(error)) as caught:
        write_out(call, saved, out)
    assert str(error) in str(caught.value)
    assert unchanged(tmp_path) == before


@pytest.mark.parametrize("call", OUTPUTS)
def test_two_writers_of_one_target(call, saved, tmp_path):
    """The second is refused while the first writes; what a killed one left is cleared by the next."""
    (left := tmp_path / ".out.partial").mkdir()
    fd = os.open(left, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    before = unchanged(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot write .*out: another .* is writing it"):
        write_out(call, saved, tmp_path / "out")
    assert unchanged(tmp_path) == before
    os.close(fd)
    write_out(call, saved, tmp_path / "out")
    assert not left.exists() and (tmp_path / "out").exists()


@pytest.mark.parametrize("call", OUTPUTS)
def test_only_what_a_save_left_is_cleared_away(call, saved, tmp_path):
    """A directory of somebody's that has the name a save would write to stays as it is."""
    (left := tmp_path / ".out.partial").mkdir()
    (left / "thesis.tex").write_text("years of work")
    (tmp_path / ".other.partial").touch()
    before = unchanged(tmp_path)
    for name, what in (("out", "thesis\\.tex"), ("other", "it isn't a directory")):
        with pytest.raises(CheckpointError, match=rf"has content that no save has written(.|\n)*{what}"):
            write_out(call, saved, tmp_path / name)
    assert unchanged(tmp_path) == before
