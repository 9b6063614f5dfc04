"""Damage: whatever happens to the bytes of a checkpoint, a load refuses it by name or gives what was saved."""

import dataclasses
import io
import json
import os
import pickle
import random
import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.base.errors import CheckpointError
from fsharding.checkpoint.reader import damage
from fsharding.testing import assert_bitwise_equal
from tests.checkpoints import Evil, described, planned, read_metadata, refusal, reseal, state_of
from tests.helpers import full, slow


def outcome(folder: Path, truth, layout) -> str:
    """What a load says; it either raises a `CheckpointError` or gives what was saved."""
    try:
        found = ck.load(folder, layout)
    except CheckpointError as error:
        return str(error)
    assert_bitwise_equal(found, truth)
    return ""


@slow
@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=full)])
def test_a_flipped_bit_anywhere(saved, count):
    layout = planned()
    truth = state_of(layout)
    files = {file: file.read_bytes() for file in sorted(saved.iterdir())}
    draw, refused = random.Random(count), 0
    for _ in range(count):
        file = draw.choice([*files])
        data = bytearray(files[file])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        text = outcome(saved, truth, layout)
        assert not text or (file.name in text and str(saved) in text)
        refused += bool(text)
        file.write_bytes(files[file])
    assert refused > 0.9 * count
    assert outcome(saved, truth, layout) == ""


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
def test_each_file_cut_removed_or_swapped(saved, tmp_path, name):
    layout = planned()
    truth = state_of(layout)
    ck.save(tmp_path / "13", truth.replace(step=torch.tensor(13)))
    file, data = saved / name, (saved / name).read_bytes()
    for size in (0, 1, len(data) // 2, len(data) - 2):
        file.write_bytes(data[:size])
        assert name in outcome(saved, truth, layout)
    file.write_bytes(data + b"\0")
    assert name == "manifest.json" or name in outcome(saved, truth, layout)
    file.unlink()
    assert name in outcome(saved, truth, layout)
    shutil.copy(tmp_path / "13" / name, file)
    swapped = outcome(saved, truth, layout)
    assert swapped or data == file.read_bytes()


def test_added_files_and_directories_change_nothing(saved):
    (saved / "__9_0.distcp").write_bytes(b"junk")
    (saved / "more").mkdir()
    (saved / "link").symlink_to("/etc")
    assert outcome(saved, state_of(planned()), planned()) == ""


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_links_are_not_followed(saved, tmp_path, name):
    shutil.move(saved / name, tmp_path / "elsewhere")
    (saved / name).symlink_to(tmp_path / "elsewhere")
    assert f"{name} isn't a plain file" in outcome(saved, None, planned())


def test_a_file_that_shrinks_while_it_is_read_is_an_error(saved, monkeypatch):
    monkeypatch.setattr("fsharding.checkpoint.loading.damage", lambda *args, **kwargs: [])
    os.truncate(saved / "__0_0.distcp", 100)
    size = ck.metadata(saved).files["__0_0.distcp"].bytes
    assert f"__0_0.distcp ends before its {size:,} bytes" in outcome(saved, None, planned())


def test_damage_of_every_block_is_found(tmp_path):
    file = tmp_path / "x"
    file.write_bytes(os.urandom(9 << 20))
    files = {"x": described(file)}
    assert len(files["x"].sha256) == 3
    assert damage(tmp_path, files) == []
    for block, at in enumerate((0, 5 << 20, (9 << 20) - 1)):
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
        (row,) = damage(tmp_path, files)
        assert f"in block {block + 1} of 3, the manifest says" in row
        data[at] ^= 1
        file.write_bytes(data)
    assert damage(tmp_path, files, hashed=False) == []


# ------------------------------------------------------------------------------------------------- what is in a record
def replace_record(folder: Path, path: str, record: bytes, length: int | None = None) -> None:
    """Gives a leaf another record, and a manifest that says all is well."""
    found = read_metadata(folder)
    info = next(info for index, info in found.storage_data.items() if index.fqn == path)
    data = (folder / info.relative_path).read_bytes()
    info.offset, info.length = len(data), len(record) if length is None else length
    (folder / info.relative_path).write_bytes(data + record)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    reseal(folder)


def record_of(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def members(record: bytes, method=zipfile.ZIP_STORED, **changes) -> bytes:
    """A record with some members changed."""
    old, new = zipfile.ZipFile(io.BytesIO(record)), io.BytesIO()
    with zipfile.ZipFile(new, "w", method) as archive:
        for name in old.namelist():
            data = changes.get(name.partition("/")[2].replace("/", "_").replace(".", "_"), old.read(name))
            if data is not None:
                archive.writestr(name, data)
    return new.getvalue()


def moved_directory(record: bytes) -> bytes:
    """A record whose zip says that its directory begins further back, so that members begin before it does."""
    start = int.from_bytes(record[-6:-2], "little")
    return record[:-6] + (start + 64).to_bytes(4, "little") + record[-2:]


TABLE = torch.arange(21.0).reshape(7, 3)
STRIDED = record_of(torch.arange(60.0)[4:46:2].as_strided((7, 3), (1, 14), 3))


@pytest.mark.parametrize(
    ("record", "row"),
    [
        (b"", "it isn't a torch.save record"),
        (b"junk" * 99, "it isn't a torch.save record"),
        (record_of({"a": TABLE}), "it holds a dict, no tensor"),
        (record_of([TABLE]), "it holds a list, no tensor"),
        (record_of(torch.nn.Parameter(TABLE)), "it holds a torch._utils._rebuild_parameter, no tensor"),
        (record_of(TABLE.double()), "it is float64[7, 3], should be float32[7, 3]"),
        (record_of(TABLE.t().contiguous()), "it is float32[3, 7], should be float32[7, 3]"),
        (members(record_of(TABLE), data_0=b"\0" * 80), "it has 80 bytes of values, fewer than"),
        (members(record_of(TABLE), data_0=None), "it has no data/0"),
        (members(record_of(TABLE), data_pkl=None), "it has no data.pkl"),
        (members(record_of(TABLE), byteorder=b"big"), "a different byte order"),
        (members(record_of(TABLE), zipfile.ZIP_DEFLATED), "is compressed or encrypted"),
        (members(record_of(TABLE), data_pkl=b"\x80\x02" + b"(" * (1 << 17)), "more than a tensor's"),
        (members(record_of(TABLE), data_pkl=b"\x80\x02."), "its pickle is broken"),
        (members(record_of(TABLE), data_pkl=b"\x80\x02ctorch\nFloatStorage\n."), "it holds a dtype, no tensor"),
        (moved_directory(members(record_of(TABLE))), "is not where its directory says"),
    ],
    ids=range(16),
)
def test_records_that_are_no_such_tensor(saved, record, row):
    replace_record(saved, "params.table", record)
    text = refusal(ck.load, saved, planned())
    assert text.startswith(f"fs.checkpoint.load refuses a record of {saved / '__0_0.distcp'}.\n  params.table: ")
    assert row in text
    assert "\nThe file may be an attempt to run code here." in text


def test_a_sparse_record_is_named_with_what_to_save_instead(saved):
    replace_record(saved, "params.table", record_of(TABLE.to_sparse()))
    text = refusal(ck.load, saved, planned())
    assert text.startswith(f"fs.checkpoint.load cannot read a record of {saved / '__0_0.distcp'}.\n  params.table: ")
    assert "it is sparse: save x.to_dense()" in text and "attempt to run code" not in text


def test_any_tensor_that_torch_saves_can_be_read(saved):
    want = torch.arange(60.0)[4:46:2].as_strided((7, 3), (1, 14), 3)
    for record in (STRIDED, members(STRIDED), record_of(want.t().contiguous().t())):
        replace_record(saved, "params.table", record)
        assert torch.equal(ck.load_leaves(saved, "params.table")["params.table"], want)


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch.load", "torch._utils._rebuild_sparse_tensor"])
def test_code_in_a_record_does_not_run(saved, tmp_path, name):
    module, _, function = name.rpartition(".")
    pickled = f"\x80\x02c{module}\n{function}\n(X\x01\x00\x00\x00aTR.".encode("latin1")
    for record in (members(record_of(TABLE), data_pkl=pickled), record_of(Evil(str(tmp_path / "ran")))):
        replace_record(saved, "params.table", record)
        assert "which no state dict needs" in refusal(ck.load, saved, planned())
    assert not (tmp_path / "ran").exists()


def test_a_pickle_cannot_change_what_reads_it(saved):
    build = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x04\x00\x00\x00evilK\x01s\x86b."
    replace_record(saved, "params.table", members(record_of(TABLE), data_pkl=build.replace(b"\x86b", b"b")))
    text = refusal(ck.load, saved, planned())
    assert "its pickle sets attributes of torch._utils._rebuild_tensor_v2" in text


@pytest.mark.parametrize("name", ["../12/__0_0.distcp", "/etc/passwd", "..", "a/b", ".metadata/../__0_0.distcp"])
def test_paths_in_the_metadata_stay_inside(saved, name):
    found = read_metadata(saved)
    for info in found.storage_data.values():
        info.relative_path = name
    (saved / ".metadata").write_bytes(pickle.dumps(found))
    reseal(saved)
    assert "is in no file that the manifest names" in refusal(ck.load, saved, planned())


# --------------------------------------------------------------------------------------------------------- other formats
@pytest.mark.parametrize(
    ("backend", "mend"),
    [
        ("torch_dist", "Read it with fs.megatron.load(path, layout, config), or fs.megatron.load_state."),
        ("zarr", "Pass a directory that fs.checkpoint.save has written."),
    ],
)
def test_formats_of_megatron_are_refused_by_name(tmp_path, backend, mend):
    (tmp_path / "a").mkdir()
    said = {"sharded_backend": backend, "sharded_backend_version": 1, "common_backend": "torch"}
    (tmp_path / "a" / "metadata.json").write_text(json.dumps(said))
    (tmp_path / "a" / "common.pt").write_bytes(b"")
    assert refusal(ck.load, tmp_path / "a", planned()) == (
        f"fs.checkpoint.load finds no checkpoint at {tmp_path / 'a'}: it is one in Megatron's {backend} format.\n{mend}"
    )
    assert ck.latest(tmp_path) is None


def test_zarr_without_metadata(tmp_path):
    (tmp_path / "optimizer.state").mkdir()
    (tmp_path / "optimizer.state" / ".zarray").write_text("{}")
    assert "Megatron's zarr format" in refusal(ck.load_leaves, tmp_path, "params")


def test_a_manifest_whose_checksums_are_too_few(saved):
    manifest = ck.metadata(saved)
    for file in (ck.SavedFile(100, ()), ck.SavedFile(100, ("", "")), ck.SavedFile(100, ("",), 0)):
        text = dataclasses.replace(manifest, files={**manifest.files, "__0_0.distcp": file})
        (saved / "manifest.json").write_text(fs.checkpoint.manifest.text_of(text))
        assert "checksums of" in refusal(ck.load, saved, planned())


def test_what_plain_torch_wrote_is_read_by_the_same_source(tmp_path):
    state = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "n": 3,
        "t": torch.tensor(1),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    source = ck.reader.open_source(tmp_path / "a", None)
    assert {path: str(leaf) for path, leaf in source.leaves.items()} == {
        "a": "float32[3, 4]",
        "b": "bfloat16[2]",
        "t": "int64[]",
    }
    out = torch.zeros(2, 2, dtype=torch.float64)
    source.read("a", ((1, 3), (1, 3)), out)
    assert torch.equal(out, state["a"][1:, 1:3].double())


def test_a_structure_with_leaves_that_are_not_listed_is_refused(tmp_path):
    layout = planned(fs.zero(3))
    ck.save(tmp_path / "a", state_of(layout))
    structure = {"dict": {"lost": "leaf"}}
    reseal(tmp_path / "a", structure=structure)
    assert refusal(ck.load, tmp_path / "a", layout) == (
        "fs.checkpoint.load cannot read a checkpoint whose optimizer state has 1 leaves that it does not list.\n"
        "  opt_state.lost\n"
        "Use a different checkpoint, or a copy of this one; or pass the optimizer, opt=."
    )
