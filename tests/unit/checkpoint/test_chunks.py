"""The table of chunks in a manifest: what it saves a load, what of it is refused, and checkpoints that have none."""

import dataclasses
import pickle
from pathlib import Path

import pytest
import torch

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.checkpoint import chunks, manifest, reader, torch_pickles
from fsharding.checkpoint.reader import open_source
from fsharding.sharding.named_sharding import LeafType
from fsharding.testing import assert_bitwise_equal
from tests.checkpoints import planned, read_metadata, refusal, reseal, state_of

NEEDED = "Use a different checkpoint, or a copy of this one."


@pytest.fixture
def read(monkeypatch):
    """What is read as a pickle, as text."""
    result: list[str] = []

    def counted(module, name):
        plain = getattr(module, name)

        def call(*args):
            result.append("record" if module is torch_pickles else "metadata")
            return plain(*args)

        monkeypatch.setattr(module, name, call)

    for module in (chunks, torch_pickles):
        counted(module, "unpickled")
    return result


def everything(folder: Path) -> dict[str, torch.Tensor]:
    return ck.load_leaves(folder, [*ck.metadata(folder).tree])


def without_chunks(folder: Path) -> Path:
    """A checkpoint as it was before its manifest had chunks."""
    reseal(folder, chunks=None)
    assert '"chunks"' not in (folder / "manifest.json").read_text()
    return folder


def test_no_pickle_of_our_own_checkpoint_is_read(saved, tmp_path, read):
    assert_bitwise_equal(ck.load(saved, planned()), state_of(planned()))
    leaves = everything(saved)
    fs.foreign.export(saved, tmp_path / "weights", "torch")
    ck.reshard_checkpoint(saved, tmp_path / "two", {"dp": 2})
    assert read == []
    assert_bitwise_equal(everything(tmp_path / "two"), leaves)
    assert read == []
    assert not ck.inspect(saved).damaged
    assert read == ["metadata", *["record"] * len(leaves)]


@pytest.mark.parametrize("opened", [".metadata", "__0_0.distcp"])
def test_metadata_is_read_once_to_compare_its_checksum(saved, monkeypatch, opened):
    names: list[str] = []
    plain = reader.open_plain
    monkeypatch.setattr(reader, "open_plain", lambda path: (names.append(Path(path).name), plain(path))[1])
    ck.load(saved, planned())
    assert names.count(opened) == 1


def test_a_checkpoint_without_chunks_loads_bit_for_bit(saved, tmp_path, read):
    new = everything(saved)
    assert_bitwise_equal(ck.load(without_chunks(saved), planned(fs.zero(0))), state_of(planned(fs.zero(0))))
    assert read.count("metadata") == 1 and read.count("record") == len(new)
    assert_bitwise_equal(everything(saved), new)
    ck.reshard_checkpoint(saved, tmp_path / "two", {"dp": 2})
    assert ck.metadata(tmp_path / "two").chunks is not None
    assert_bitwise_equal(everything(tmp_path / "two"), new)
    assert not ck.inspect(saved).damaged


def test_both_sources_give_one_table(saved, tmp_path):
    ck.reshard_checkpoint(saved, tmp_path / "two", {"dp": 2})
    for folder in (saved, tmp_path / "two"):
        found = ck.metadata(folder)
        given = chunks.from_manifest(folder, found)
        told = open_source(folder, found, as_torch=True).located()
        assert found.chunks == chunks.described(told)
        assert chunks.described(chunk for leaf in given.values() for chunk in leaf.chunks) == found.chunks
        theirs = {(chunk.path, chunk.box): chunk for chunk in told}
        mine = {(chunk.path, chunk.box): chunk for leaf in given.values() for chunk in leaf.chunks}
        assert mine.keys() == theirs.keys() and len(told) == len(theirs)
        for at, ours in mine.items():
            name, first, length = theirs[at].place
            assert (ours.leaf, ours.place.file) == (theirs[at].leaf, name) and first < ours.place.first < first + length
    assert max(text.count(",") for text in ck.metadata(tmp_path / "two").chunks.values()) == 1


def test_what_it_looks_like(saved):
    found = ck.metadata(saved)
    assert [*found.chunks] == [*found.tree]
    number, start, *ranges = found.chunks["params.blocks.w"].split(" ")
    assert (number, ranges) == ("0", ["0:2", "0:5", "0:3"])
    data = (saved / "__0_0.distcp").read_bytes()[int(start) :][: 30 * 4]
    assert torch.equal(
        torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(2, 5, 3),
        everything(saved)["params.blocks.w"],
    )
    assert len(found.chunks["step"].split(" ")) == 2


def test_a_table_that_is_too_large_is_not_written(tmp_path, monkeypatch, read):
    monkeypatch.setattr(chunks, "_MOST_BYTES", 100)
    ck.save(tmp_path / "a", state_of(planned()))
    assert ck.metadata(tmp_path / "a").chunks is None
    assert_bitwise_equal(ck.load(tmp_path / "a", planned()), state_of(planned()))
    assert read and not ck.inspect(tmp_path / "a").damaged


def test_chunks_whose_values_have_no_known_place_are_not_described():
    leaf, place = LeafType((4,), torch.float32), chunks.Place("__3_0.distcp", 0, 200)
    known = chunks.Chunk("x", leaf, ((0, 2),), place, 64)
    rest = known._replace(box=((2, 4),), values=128)
    assert chunks.described([rest, known]) == {"x": "3 64 0:2,3 128 2:4"}
    assert chunks.described([known, rest._replace(values=None)]) is None
    empty = known._replace(path="y", leaf=LeafType((0,), torch.float32), box=((0, 0),), values=None)
    assert chunks.described([empty]) == {"y": "3 0 0:0"}


# ------------------------------------------------------------------------------------------------------ made by somebody
def place(saved: Path) -> int:
    return int(ck.metadata(saved).chunks["params.table"].split(" ")[1])


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("0 {end} 0:7 0:3", "chunk ((0, 7), (0, 3)) is not inside __0_0.distcp"),
        ("0 {past} 0:7 0:3", "chunk ((0, 7), (0, 3)) is not inside __0_0.distcp"),
        ("0 -64 0:7 0:3", "chunk ((0, 7), (0, 3)) is not inside __0_0.distcp"),
        ("0 99999999999999999999999 0:7 0:3", "chunk ((0, 7), (0, 3)) is not inside __0_0.distcp"),
        ("1 64 0:7 0:3", "chunk ((0, 7), (0, 3)) is in no file that the manifest names"),
        ("-1 64 0:7 0:3", "chunk ((0, 7), (0, 3)) is in no file that the manifest names"),
        ("0 64 0:8 0:3", "chunk ((0, 8), (0, 3)) is outside [7, 3]"),
        ("0 64 -1:7 0:3", "chunk ((-1, 7), (0, 3)) is outside [7, 3]"),
        ("0 64 7:0 3:0", "chunk ((7, 0), (3, 0)) is outside [7, 3]"),
        ("0 64 0:6 0:3", "its 1 chunks have 18 of 21 elements"),
        ("", "its 0 chunks have 0 of 21 elements"),
        ("0 64 0:4 0:3,0 64 0:3 0:3", "its 2 chunks have 21 of 21 elements"),
        ("0 64 0:4 0:3,0 64 1:4 0:3", "its chunks overlap"),
        ("0 64 0:7", "its chunks have 4 numbers, 6 each"),
        ("0 64 0:7 0:x", "invalid literal for int() with base 10: 'x'"),
        ("../x 64 0:7 0:3", "invalid literal for int() with base 10: '../x'"),
        ("9" * 5000, "Exceeds the limit (4300 digits)"),
    ],
)
def test_places_that_are_none_are_refused(saved, tmp_path, text, row):
    found = ck.metadata(saved)
    size = found.files["__0_0.distcp"].bytes
    text = text.format(end=size - 83, past=size + 1)
    reseal(saved, chunks=found.chunks | {"params.table": text})
    calls = {
        "fs.checkpoint.load": lambda: ck.load(saved, planned()),
        "fs.checkpoint.load_leaves": lambda: ck.load_leaves(saved, "params.counts"),
        "fs.foreign.export": lambda: fs.foreign.export(saved, tmp_path / "out", "torch"),
        "fs.checkpoint.reshard_checkpoint": lambda: ck.reshard_checkpoint(saved, tmp_path / "out", {"dp": 2}),
    }
    for name, call in calls.items():
        said = refusal(call)
        assert said.startswith(
            f"{name} cannot read {saved}: its manifest.json does not fit its files.\n  params.table: {row}"
        )
        assert said.endswith(f"\n{NEEDED}")
    assert ck.inspect(saved).damaged == (".metadata: its chunks are not where manifest.json says",)


def test_the_last_bytes_of_a_file_are_inside(saved):
    found = ck.metadata(saved)
    size = found.files["__0_0.distcp"].bytes
    reseal(saved, chunks=found.chunks | {"params.table": f"0 {size - 84} 0:7 0:3"})
    assert ck.load_leaves(saved, "params.table")["params.table"].shape == (7, 3)
    assert ck.inspect(saved).damaged


def test_leaves_that_only_one_of_the_two_has(saved):
    found = ck.metadata(saved)
    rest = {path: text for path, text in found.chunks.items() if path != "params.table"}
    reseal(saved, chunks=rest)
    assert "  params.table: its 0 chunks have 0 of 21 elements" in refusal(ck.load, saved, planned())
    reseal(saved, chunks=found.chunks | {"other": "0 64"})
    assert "  other: isn't a leaf" in refusal(ck.load, saved, planned())


@pytest.mark.parametrize("table", [[], ["0 64"], "0 64", 3, {"step": 3}, {"step": ["0 64"]}, {"step": None}])
def test_a_table_that_is_none(saved, table):
    text = manifest.text_of(dataclasses.replace(ck.metadata(saved), chunks=table))
    (saved / "manifest.json").write_text(text)
    assert "its manifest.json is damaged" in refusal(ck.load, saved, planned())
    assert ck.inspect(saved).damaged


@pytest.mark.parametrize("move", ["swapped", "another box"])
def test_inspect_compares_the_table_with_what_torch_reads(saved, move):
    """Torch would read something else, though all checksums are right."""
    kept = ck.metadata(saved).chunks
    found = read_metadata(saved)
    places = {index.fqn: index for index in found.storage_data}
    if move == "swapped":
        a, b = places["opt_state.states.1.mu.table"], places["opt_state.states.1.nu.table"]
        found.storage_data[a], found.storage_data[b] = found.storage_data[b], found.storage_data[a]
    else:
        index, (chunk,) = places["params.table"], found.state_dict_metadata["params.table"].chunks
        halves = [(torch.Size([n, 0]), torch.Size([size, 3])) for n, size in ((0, 7), (7, 0))]
        found.state_dict_metadata["params.table"].chunks[:] = [type(chunk)(*half) for half in halves]
        for offset, _ in halves:
            found.storage_data[type(index)("params.table", offset)] = found.storage_data[index]
    (saved / ".metadata").write_bytes(pickle.dumps(found))
    reseal(saved, chunks=kept)
    assert ck.inspect(saved).damaged
    assert_bitwise_equal(ck.load(saved, planned()), state_of(planned()))


def test_one_flipped_bit_of_metadata_is_found_though_nothing_of_it_is_used(saved):
    data = bytearray((saved / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (saved / ".metadata").write_bytes(data)
    text = refusal(ck.load, saved, planned())
    assert text.startswith(
        f"fs.checkpoint.load refuses {saved}: 1 of its 2 files are damaged.\n  .metadata has the sha256"
    )
