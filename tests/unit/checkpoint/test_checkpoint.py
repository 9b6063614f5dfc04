"""Checkpoints in one process: round trips, every kind of damage by name, and what a directory may look like after a crash."""

import dataclasses
import functools
import os
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.base.errors import CheckpointError, DonatedError, LayoutError
from fsharding.checkpoint import directory
from fsharding.checkpoint import manifest as manifests
from fsharding.checkpoint.serialized_layout import describe, known_names, rebuild
from fsharding.formats.precision import ScaleState
from fsharding.testing import assert_bitwise_equal
from tests.checkpoints import (
    Evil,
    Wrapped,
    at_step,
    draws,
    optimizer,
    planned,
    read_metadata,
    refusal,
    reseal,
    state_of,
)
from tests.helpers import slow

FP32_SCALED = fs.Precision(loss_scale=fs.formats.LossScale(initial=8.0))


# ---------------------------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16, fs.FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("given", [True, False], ids=["opt", "manifest"])
def test_round_trip(tmp_path, level, precision, given):
    layout = planned(fs.zero(level), precision)
    state = state_of(layout)
    ck.save(tmp_path / "a", state)
    again = ck.load(tmp_path / "a", layout, opt=optimizer() if given else None)
    assert type(again.opt_state) is type(state.opt_state)
    assert again.layout is layout
    assert_bitwise_equal(again, state)


def test_what_is_loaded_is_new_memory(saved):
    first, second = (ck.load(saved, planned()) for _ in range(2))
    first.params["table"].to_local().fill_(0)
    assert second.params["table"].to_local().abs().sum() > 0


def test_bf16_loads_as_fp32(tmp_path):
    state = state_of(planned(fs.zero(1), fs.BF16))
    ck.save(tmp_path / "a", state)
    again = ck.load(tmp_path / "a", planned(fs.zero(3)), opt=optimizer())
    assert again.main is None
    for path, x in fs.tree.named_leaves(state.main).items():
        assert_bitwise_equal(fs.tree.at(again.params, path), x)


@pytest.mark.parametrize(
    "opt",
    [
        fs.sgd(0.1),
        fs.sgd(0.1, momentum=0.9),
        fs.adamw(1e-3, moments=torch.bfloat16),
        fs.optim.multi_transform(
            {"a": fs.adamw(1e-2), "b": fs.sgd(0.1, momentum=0.5)}, lambda path, x: "a" if x.ndim > 1 else "b"
        ),
        fs.optim.adafactor(),
        fs.optim.chain(
            fs.optim.add_noise(0.1, fs.random.key(0)),
            fs.optim.lookahead(fs.optim.from_torch(torch.optim.NAdam)),
            fs.optim.ema(),
        ),
    ],
    ids=["sgd", "momentum", "adamw_bf16", "masked", "adafactor", "registered"],
)
@pytest.mark.parametrize("given", [True, False], ids=["opt", "manifest"])
def test_optimizers(tmp_path, opt, given):
    layout = planned(frozen=("pair",))
    state = state_of(layout, opt)
    ck.save(tmp_path / "a", state)
    assert_bitwise_equal(ck.load(tmp_path / "a", layout, opt=opt if given else None), state)


def test_loss_scale_is_dropped_or_made(tmp_path):
    scaled, plain = planned(precision=FP32_SCALED), planned()
    state = state_of(scaled).replace(loss_scale=ScaleState(torch.tensor(4.0), torch.tensor(17)))
    ck.save(tmp_path / "scaled", state)
    ck.save(tmp_path / "plain", state_of(plain))
    assert_bitwise_equal(ck.load(tmp_path / "scaled", scaled).loss_scale, state.loss_scale)
    assert ck.load(tmp_path / "scaled", plain).loss_scale is None
    assert_bitwise_equal(ck.load(tmp_path / "plain", scaled).loss_scale, FP32_SCALED.init_scale())


def wrapping(opt):
    """An optimizer of a user, with a state class that we do not know."""
    return fs.optim.GradientTransformation(lambda p: Wrapped(opt.init(p), torch.zeros(3)), opt.update)


def test_state_of_an_unknown_class_needs_opt(tmp_path):
    layout, opt = planned(), wrapping(fs.sgd(0.1))
    state = state_of(layout, opt)
    ck.save(tmp_path / "a", state)
    assert_bitwise_equal(ck.load(tmp_path / "a", layout, opt=opt), state)
    name = f"{Wrapped.__module__}.Wrapped"
    assert refusal(ck.load, tmp_path / "a", layout) == (
        "fs.checkpoint.load cannot rebuild the optimizer state from the manifest alone.\n"
        f"  opt_state is a {name}(inner, mean); known are {', '.join(known_names())}\n"
        "Pass the optimizer that made it: opt=..."
    )


REBUILT = """
import sys
import fsharding as fs
from fsharding.checkpoint.serialized_layout import rebuild
fs.adamw, fs.optim.muon
assert not [name for name in sys.modules if name.startswith("fsharding.contrib")]
fields = dict.fromkeys(("count", "row", "col", "full"), "leaf")
assert type(rebuild({"namedtuple": "AdafactorState", "fields": fields}, str)) is fs.optim.AdafactorState
"""


def test_states_of_registered_optimizers_need_no_import():
    subprocess.run([sys.executable, "-c", REBUILT], check=True, timeout=120)
    with pytest.raises(CheckpointError, match="adafactor"):  # a name of `fs.optim`, but not of a state
        rebuild({"namedtuple": "adafactor", "fields": {}}, str)


def test_plain_torch_reads_a_leaf(tmp_path):
    state = state_of(planned(fs.zero(1), fs.BF16))
    ck.save(tmp_path / "a", state)
    got = {"params.table": torch.zeros(7, 3), "step": torch.tensor(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(got, checkpoint_id=tmp_path / "a")
    assert_bitwise_equal(got, {"params.table": state.main["table"].to_local(), "step": torch.tensor(12)})


# ------------------------------------------------------------------------------------------------------------- manifest
def test_manifest(saved):
    found = ck.metadata(saved)
    assert (found.step, found.extra, found.version, found.torch) == (12, {"seed": 1}, 1, torch.__version__)
    assert found.layout["mesh"] == {"dp": 1}
    assert found.layout["strategy"] == "zero3"
    assert found.layout["precision"]["compute"] is None
    assert found.layout["rules"]["embed"] == ["dp", "ep", "cp"]
    assert found.layout["frozen"] == ["counts"]
    assert found.tree["params.blocks.w"] == ck.SavedLeaf((2, 5, 3), "float32", "P()")
    assert found.tree["params.counts"].dtype == "int64"
    assert found.tree["opt_state.states.1.mu.blocks.scale"].shape == ()
    assert found.tree["key"] == ck.SavedLeaf((2,), "int64", None)
    assert found.structure["namedtuple"] == "ChainState"
    assert (
        sorted(os.listdir(saved))
        == sorted([*found.files, "manifest.json"])
        == [".metadata", "__0_0.distcp", "manifest.json"]
    )
    assert found.files["__0_0.distcp"].bytes == (saved / "__0_0.distcp").stat().st_size
    assert manifests.parse(manifests.text_of(found).encode(), "here") == found


def test_files_hold_no_path_of_this_machine_and_are_reproducible(saved, tmp_path):
    ck.save(tmp_path / "again", state_of(planned()), extra={"seed": 1})
    for name in os.listdir(saved):
        data = (saved / name).read_bytes()
        assert str(tmp_path).encode() not in data
        assert data == (tmp_path / "again" / name).read_bytes()


@slow
def test_a_flipped_bit_in_the_manifest_is_refused_or_says_the_same(saved):
    text, truth = (saved / "manifest.json").read_bytes(), ck.metadata(saved)
    refused = 0
    for i in range(0, len(text), 5):
        bad = bytes([*text[:i], text[i] ^ (1 << i % 8), *text[i + 1 :]])
        try:
            assert manifests.parse(bad, "here") == truth, i
        except CheckpointError:
            refused += 1
    assert refused > 0.9 * len(text) / 5


def test_extra_has_to_be_json(tmp_path):
    state = state_of(planned())
    text = refusal(ck.save, tmp_path / "a", state, extra={"a": torch.zeros(1)})
    assert text == (
        "fs.checkpoint.save cannot write `extra` as JSON.\n"
        "  Object of type Tensor is not JSON serializable\n"
        "Pass only dicts, lists, strings, finite numbers, booleans and None."
    )
    assert "not JSON compliant" in refusal(ck.save, tmp_path / "a", state, extra=float("nan"))
    assert os.listdir(tmp_path) == []


def test_structure_round_trip():
    tree = {"a": (1, [2, None]), "b": fs.optim.EmptyState(), "c": fs.optim.SgdState(3, {"x": 4})}
    again = rebuild(describe(tree), lambda path: path, "t")
    assert again == {
        "a": ("t.a.0", ["t.a.1.0", None]),
        "b": (),
        "c": fs.optim.SgdState("t.c.count", {"x": "t.c.trace.x"}),
    }
    assert type(again["b"]) is fs.optim.EmptyState


@pytest.mark.parametrize(
    "plain",
    [
        {"namedtuple": "Popen", "fields": {"args": "leaf"}},
        {"namedtuple": "SgdState", "fields": {"trace": "leaf", "count": "leaf"}},
        {"other": "collections.OrderedDict"},
        {"dict": {}, "more": 1},
        {"tuple": {}},
        7,
    ],
)
def test_structure_refuses(plain):
    assert "cannot rebuild the optimizer state" in refusal(rebuild, plain, lambda path: path)


# --------------------------------------------------------------------------------------------------------------- damage
def test_no_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__0_0.distcp").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "manifest.json").mkdir()
    reasons = {
        "absent": "there is no such directory",
        "empty": "the directory is empty",
        "file": "it isn't a directory",
        "half": "there is no manifest.json in it, so its save was never finished",
        "odd": "its manifest.json isn't a plain file",
    }
    for name, reason in reasons.items():
        assert refusal(ck.load, tmp_path / name, planned()) == (
            f"fs.checkpoint.load finds no checkpoint at {tmp_path / name}: {reason}.\n"
            "fs.checkpoint.latest(directory) finds the newest complete checkpoint of a directory."
        )
        assert f"fs.checkpoint.metadata finds no checkpoint at {tmp_path / name}" in refusal(
            ck.metadata, tmp_path / name
        )
    assert ck.latest(tmp_path) is None


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_flipped_bit(saved, name, where):
    data = bytearray((saved / name).read_bytes())
    data[int(where * len(data))] ^= 1
    (saved / name).write_bytes(data)
    text = refusal(ck.load, saved, planned())
    assert re.fullmatch(
        f"fs.checkpoint.load refuses {re.escape(str(saved))}: 1 of its 2 files are damaged.\n"
        f"  {re.escape(name)} has the sha256 [0-9a-f]{{12}}..., the manifest says [0-9a-f]{{12}}...\n"
        "Use a different checkpoint, or a copy of this one.",
        text,
    )


def test_truncated_missing_swapped_linked(saved, tmp_path):
    data, pickled = saved / "__0_0.distcp", saved / ".metadata"
    size = data.stat().st_size
    other = data.read_bytes()
    os.truncate(data, 100)
    pickled.unlink()
    assert refusal(ck.load, saved, planned()) == (
        f"fs.checkpoint.load refuses {saved}: 2 of its 2 files are damaged.\n"
        "  .metadata is missing\n"
        f"  __0_0.distcp has 100 bytes, the manifest says {size:,}\n"
        "Use a different checkpoint, or a copy of this one."
    )
    ck.save(saved, state_of(planned()))
    (tmp_path / "elsewhere").write_bytes(other)
    data.unlink()
    data.symlink_to(tmp_path / "elsewhere")
    assert "__0_0.distcp isn't a plain file" in refusal(ck.load, saved, planned())
    state = state_of(planned())
    ck.save(saved, state.replace(key=fs.random.key(99)))
    shutil.copy(tmp_path / "elsewhere", data)
    assert "__0_0.distcp has the sha256" in refusal(ck.load, saved, planned())


def test_a_file_that_the_manifest_does_not_name_is_not_read(saved):
    (saved / "notes.txt").write_text("mine")
    (saved / "__7_0.distcp").write_bytes(b"\0")
    assert_bitwise_equal(ck.load(saved, planned()), state_of(planned()))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda text: text[:-40], "it is not JSON: "),
        (lambda text: b"", "it is not JSON: "),
        (lambda text: b"\xff\xfe" + text, "it is not JSON: "),
        (lambda text: b"[" * 100_000, "it is not JSON: "),
        (lambda text: text.replace(b'"step": 12', b'"step": 13'), "its checksum does not match its content"),
        (lambda text: text.replace(b'"version": 1', b'"version": "1"'), "its version is '1'"),
    ],
)
def test_damaged_manifest(saved, edit, reason):
    file = saved / "manifest.json"
    file.write_bytes(edit(file.read_bytes()))
    head = f"fs.checkpoint.load cannot read {saved}: its manifest.json is damaged.\n  {reason}"
    assert refusal(ck.load, saved, planned()).startswith(head)


@pytest.mark.parametrize(
    "files", [{"../x": [1, ""]}, {"/x": [1, ""]}, {"..": [1, ""]}, {"a\\b": [1, ""]}, {"": [1, ""]}, {"a\0": [1, ""]}]
)
def test_file_names_stay_inside(saved, files):
    named = {name: ck.SavedFile(size, ("",)) for name, (size, _) in files.items()}
    manifest = dataclasses.replace(ck.metadata(saved), files=named)
    (saved / "manifest.json").write_text(manifests.text_of(manifest))
    assert "ValueError: not a file name or dtype" in refusal(ck.load, saved, planned())


def test_unknown_dtype_in_the_manifest(saved):
    reseal(saved, tree={"step": ck.SavedLeaf((), "load", None)})
    assert "not a file name or dtype: 'step: load'" in refusal(ck.load, saved, planned())


def test_step_of_manifest_and_files(saved):
    reseal(saved, step=13)
    assert refusal(ck.load, saved, planned()) == (
        f"fs.checkpoint.load refuses {saved}: its manifest says step 13, its files step 12.\n"
        "Use a different checkpoint, or a copy of this one."
    )


def test_newer_version_and_other_format(saved):
    file = saved / "manifest.json"
    text = file.read_text()
    file.write_text(text.replace('"version": 1', '"version": 2'))
    assert refusal(ck.load, saved, planned()) == (
        f"fs.checkpoint.load cannot read {saved}: its manifest.json has format version 2, and this fsharding reads up to 1.\n"
        f"Install the fsharding that wrote it, {ck_version(text)}, or a later one."
    )
    reseal_version(file, text)
    assert ck.latest(saved.parent) == saved
    for other in ('{"format": "other"}', "[1]", "{}"):
        file.write_text(other)
        assert "not 'fsharding.checkpoint'" in refusal(ck.load, saved, planned())


def ck_version(text: str) -> str:
    found = re.search(r'"fsharding": "([^"]*)"', text)
    assert found
    return found[1]


def reseal_version(file: Path, text: str) -> None:
    """A whole manifest of the next version, with a field that we have never heard of."""
    manifest = manifests.parse(text.encode(), "here")
    file.write_text(manifests.text_of(dataclasses.replace(manifest, version=2)))


# -------------------------------------------------------------------------------------------------------------- pickles
def test_code_in_the_metadata_does_not_run(saved, tmp_path):
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(str(tmp_path / "ran"))))
    assert ".metadata has" in refusal(ck.load, saved, planned())
    reseal(saved)
    assert refusal(ck.load, saved, planned()) == (
        f"fs.checkpoint.load refuses to unpickle {os.mkdir.__module__}.mkdir, which .metadata names: no checkpoint of ours has it.\n"
        "The file may be an attempt to run code here. Use a checkpoint that you trust."
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["torch.load", "builtins.eval", "builtins.getattr", "torch.serialization.load", "pathlib.Path"]
)
def test_globals_that_are_refused(saved, name):
    module, _, function = name.rpartition(".")
    (saved / ".metadata").write_bytes(f"c{module}\n{function}\n.".encode())
    reseal(saved)
    assert f"refuses to unpickle {name}, which" in refusal(ck.load, saved, planned())


def test_code_in_a_tensor_file_does_not_run(saved, tmp_path):
    found = read_metadata(saved)
    info = next(iter(found.storage_data.values()))
    data = bytearray((saved / info.relative_path).read_bytes())
    torch.save(Evil(str(tmp_path / "ran")), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    info.offset, info.length = len(data), len(evil)
    (saved / info.relative_path).write_bytes(data + evil)
    (saved / ".metadata").write_bytes(pickle.dumps(found))
    reseal(saved)
    assert f"it names {os.mkdir.__module__}.mkdir, which no state dict needs" in refusal(ck.load, saved, planned())
    assert not (tmp_path / "ran").exists()


def tampered(edit):
    def apply(folder: Path) -> None:
        found = read_metadata(folder)
        edit(found)
        (folder / ".metadata").write_bytes(pickle.dumps(found))
        reseal(folder)

    return apply


def move_file(found):
    for info in found.storage_data.values():
        info.relative_path = "../12/__0_0.distcp"


def drop_chunk(found):
    found.state_dict_metadata["params.table"].chunks.clear()


def grow_chunk(found):
    found.state_dict_metadata["params.table"].chunks[0].sizes = torch.Size([8, 3])


def past_the_end(found):
    next(iter(found.storage_data.values())).length = 10**9


def transform(found):
    next(iter(found.storage_data.values())).transform_descriptors = ["zip"]


def other_dtype(found):
    found.state_dict_metadata["params.table"].properties.dtype = torch.bfloat16


def lose_leaf(found):
    del found.state_dict_metadata["params.table"]


def lose_storage(found):
    found.storage_data.clear()


@pytest.mark.parametrize(
    ("edit", "row"),
    [
        (move_file, ": chunk ((0, 2),) is in no file that the manifest names"),
        (drop_chunk, "params.table: its 0 chunks have 0 of 21 elements"),
        (grow_chunk, "params.table: chunk ((0, 8), (0, 3)) is outside [7, 3]"),
        (past_the_end, "chunk ((0, 2),) is not inside __0_0.distcp"),
        (transform, "chunk ((0, 2),) is not inside __0_0.distcp"),
        (other_dtype, "params.table: is bfloat16[7, 3], the manifest says float32[7, 3]"),
        (lose_leaf, "params.table: only in one of the two"),
        (lose_storage, ": chunk ((0, 2),) is in no file that the manifest names"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_metadata_that_contradict_the_manifest(saved, edit, row):
    tampered(edit)(saved)
    text = refusal(ck.load, saved, planned())
    assert text.startswith(f"fs.checkpoint.load cannot read {saved}: its .metadata does not fit its manifest.\n")
    assert row in text


@pytest.mark.parametrize("data", [b"", b"junk", pickle.dumps({}), pickle.dumps(torch.Size([1]))])
def test_metadata_that_are_none(saved, data):
    (saved / ".metadata").write_bytes(data)
    reseal(saved)
    assert "its .metadata does not fit its manifest" in refusal(ck.load, saved, planned())


# ---------------------------------------------------------------------------------------------------------- other model
def other_draws(key):
    tree = draws(key)
    del tree["counts"]
    return {**tree, "table": fs.random.normal(key, (8, 3)), "new": fs.random.zeros((2,))}


def test_other_model(saved):
    layout = planned(model=other_draws)
    assert refusal(ck.load, saved, layout, opt=fs.sgd(0.1)).splitlines()[:4] == [
        f"fs.checkpoint.load cannot use {saved}: it is a checkpoint of another model; 15 leaves differ.",
        "  params.new is missing; wanted is float32[2]",
        "  params.table is float32[7, 3]; wanted is float32[8, 3]",
        "  opt_state.count is missing; wanted is int64[]",
    ]
    text = refusal(ck.load, saved, layout)
    assert text == (
        f"fs.checkpoint.load cannot use {saved}: it is a checkpoint of another model; 3 leaves differ.\n"
        "  params.new is missing; wanted is float32[2]\n"
        "  params.table is float32[7, 3]; wanted is float32[8, 3]\n"
        "  params.counts is extra: int64[3]\n"
        "Plan the layout with the model, and the frozen leaves, that were saved."
    )


def test_other_optimizer(saved):
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(1e-2, moments=torch.bfloat16), fs.sgd(0.1))
    text = refusal(ck.load, saved, planned(), opt=opt)
    assert text.startswith(
        f"fs.checkpoint.load cannot use {saved}: it is a checkpoint of another optimizer; 11 leaves differ.\n"
        "  opt_state.states.2.count is missing; wanted is int64[]\n"
        "  opt_state.states.1.mu.blocks.scale is float32[]; wanted is bfloat16[]\n"
    )
    assert text.endswith("\nGive the optimizer that was saved: opt=...")


def test_other_main_dtype(saved):
    layout = planned(precision=fs.Precision(params=torch.bfloat16))
    assert refusal(ck.load, saved, layout).startswith(
        f"fs.checkpoint.load cannot use {saved}: it is a checkpoint of another precision; 5 leaves differ.\n"
        "  params.blocks.scale is float32[]; wanted is bfloat16[]\n"
    )


def test_other_frozen_leaves(saved, tmp_path):
    assert "params.pair.0 was trained, and is frozen in the layout" in refusal(
        ck.load, saved, planned(frozen=("pair.0",))
    )
    ck.save(tmp_path / "sgd", state_of(planned(), fs.sgd(0.1)))
    assert ck.load(tmp_path / "sgd", planned(frozen=("pair.0",))).step == 12


def test_abstract_mesh(saved):
    layout = planned().with_mesh(fs.AbstractMesh(("dp",), (4,)))
    assert refusal(ck.load, saved, layout, kind=LayoutError) == (
        "fs.checkpoint.load cannot load onto the abstract mesh {dp: 4}.\nPlan the layout on a mesh of fs.make_mesh."
    )


# --------------------------------------------------------------------------------------------------- what can be saved
def test_leaves_that_cannot_be_saved(tmp_path):
    state = state_of(planned())
    text = refusal(ck.save, tmp_path / "a", state.replace(opt_state={"rate": 0.1, "n": 3}))
    assert text == (
        "fs.checkpoint.save cannot save 2 leaves.\n"
        "  opt_state.n is a int: make it a 0-d tensor\n"
        "  opt_state.rate is a float: make it a 0-d tensor"
    )
    twice = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert refusal(ck.save, tmp_path / "a", state.replace(opt_state=twice)) == (
        "fs.checkpoint.save found paths that name two leaves.\n"
        "  opt_state.a.b\n"
        "Rename a key: keys with dots can make two paths equal."
    )
    state.donate()
    with pytest.raises(DonatedError):
        ck.save(tmp_path / "a", state)
    assert os.listdir(tmp_path) == []


def test_nothing_but_a_checkpoint_is_overwritten(tmp_path):
    state = state_of(planned())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        assert refusal(ck.save, tmp_path / name, state) == (
            f"fs.checkpoint.save cannot write {tmp_path / name}: it exists and is not a checkpoint.\n"
            "Pass a different path; only checkpoints are ever overwritten."
        )
    assert (tmp_path / "mine" / "thesis.tex").exists()
    assert sorted(os.listdir(tmp_path)) == ["file", "mine"]
    (tmp_path / "deep" / "er" / "empty").mkdir(parents=True)
    ck.save(tmp_path / "deep" / "er" / "empty", state)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "er" / "empty")
    ck.save(tmp_path / "link", state)
    assert (tmp_path / "link").is_symlink()
    assert_bitwise_equal(ck.load(tmp_path / "link", planned()), state)


# ------------------------------------------------------------------------------------------------ failures and crashes
def fail(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["os.fsync", "pathlib.Path.rename", "fsharding.checkpoint.directory.sync"])
def test_a_failed_save_leaves_the_old_checkpoint(saved, monkeypatch, where):
    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        assert refusal(ck.save, saved, at_step(13)) == (
            f"fs.checkpoint.save failed.\n  OSError: [Errno 28] No space left on device: '{saved}'"
        )
    assert os.listdir(saved.parent) == ["12"]
    assert ck.load(saved, planned()).step == 12
    ck.save(saved, at_step(14))
    assert ck.load(saved, planned()).step == 14


def test_the_second_rename_fails(saved, monkeypatch):
    rename = Path.rename

    def only_aside(self, target):
        return fail() if self.name.endswith(".partial") else rename(self, target)

    monkeypatch.setattr(Path, "rename", only_aside)
    assert "No space left" in refusal(ck.save, saved, at_step(13))
    assert os.listdir(saved.parent) == ["12"]
    assert ck.load(saved, planned()).step == 12


@pytest.mark.parametrize("call", range(1, 14))
def test_a_crash_anywhere_leaves_something_to_load(saved, monkeypatch, call):
    """Stops for good at the n-th change to the directory, as a power cut does, and looks at what is there."""
    count = 0

    class PowerCut(BaseException):
        pass

    def cutting(original):
        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count >= call:
                raise PowerCut
            return original(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        for owner, name in [(Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (os, "fsync")]:
            patch.setattr(owner, name, cutting(getattr(owner, name)))
        try:
            ck.save(saved, at_step(13))
            finished = True
        except (PowerCut, CheckpointError):
            finished = False
    found = ck.latest(saved.parent)
    assert found is not None
    assert ck.load(found, planned()).step == ck.load(saved, planned()).step == ck.metadata(saved).step
    assert ck.metadata(saved).step in ((13,) if finished else (12, 13))
    ck.save(saved, at_step(14))
    assert os.listdir(saved.parent) == ["12"]
    assert ck.load(saved, planned()).step == 14


def test_interrupted_between_the_renames(saved):
    os.rename(saved, saved.parent / ".12.replaced")
    (saved.parent / ".12.partial").mkdir()
    assert ck.latest(saved.parent) == saved.parent / ".12.replaced"
    assert ck.metadata(saved).step == 12
    assert ck.load(saved, planned()).step == 12
    shutil.copytree(saved.parent / ".12.replaced", saved)
    reseal(saved, step=11)
    assert ck.latest(saved.parent) == saved
    ck.save(saved, at_step(14))
    assert os.listdir(saved.parent) == ["12"]


def test_latest(tmp_path):
    assert ck.latest(tmp_path / "absent") is None
    assert ck.latest(tmp_path) is None
    for name, step in [("b", 7), ("3", 3), ("best model", 9)]:
        ck.save(tmp_path / name, at_step(step))
    assert ck.latest(tmp_path) == tmp_path / "best model"
    (tmp_path / "best model" / ".metadata").unlink()
    assert ck.latest(str(tmp_path)) == tmp_path / "b"
    os.truncate(tmp_path / "b" / "__0_0.distcp", 9)
    shutil.copytree(tmp_path / "3", tmp_path / ".4.partial")
    (tmp_path / "5").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "manifest.json").write_text("{}")
    assert ck.latest(tmp_path) == tmp_path / "3"


def test_a_directory_that_is_not_shared(tmp_path):
    (tmp_path / ".a.partial").mkdir()
    files = {"__1_0.distcp": ck.SavedFile(3, ("",))}
    assert refusal(directory.commit, tmp_path / "a", "", files) == (
        f"fsharding needs a directory that all ranks share; {tmp_path} isn't shared.\n"
        "  __1_0.distcp: incomplete on rank 0\n"
        "Pass a path on a file system that every host has mounted at the same place."
    )
