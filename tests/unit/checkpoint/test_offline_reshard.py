"""Checkpoints without ranks: resharded, inspected and exported bit by bit, all or nothing, and in little memory."""

import errno
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.apps.cli import main as cli
from fsharding.base.errors import MeshError
from fsharding.checkpoint import byte_ranges
from fsharding.checkpoint.chunks import from_metadata
from fsharding.checkpoint.writer import Writer
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal
from tests.checkpoints import FORMATS, refusal, same_bits, weight_draws
from tests.helpers import full, slow

ROOT = Path(__file__).resolve().parents[3]
FP16_SCALED = fs.Precision(compute=torch.float16, loss_scale=fs.formats.LossScale(initial=8.0))
NAMES = {"blocks.w": fs.foreign.Transposed("h.{i}.weight"), "blocks.b": "h.{i}.bias"}


def read_back(kind: str, path: Path) -> dict[str, torch.Tensor]:
    """What other programs read."""
    if kind == "torch":
        return torch.load(path, weights_only=True)
    if kind == "safetensors":
        return {name: x for file in path.glob("*.safetensors") for name, x in safetensors.torch.load_file(file).items()}
    metadata = torch_dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        torch_dcp.load(found, checkpoint_id=path)
    return found


def draws(key):
    return {**weight_draws(key), "none": fs.random.zeros((0, 3))}


DIM_NAMES = {
    "table": ("vocab", "embed"),
    "blocks": {"w": ("layers", "heads", "embed"), "b": ("layers", "embed")},
    "scale": (),
    "counts": (None,),
    "none": (None, "embed"),
}


def planned(strategy=fs.zero(3), precision=fs.FP32):
    mesh = fs.make_mesh(device="cpu")
    return fs.plan_layout(
        draws(fs.random.key(0)), mesh, strategy=strategy, precision=precision, names=DIM_NAMES, frozen="scale"
    )


def state_of(layout):
    state = fs.init_state(draws, fs.adamw(1e-2), fs.random.key(3), layout)
    for number, x in enumerate(map(local_of, fs.tree.leaves(state.opt_state))):
        x += (torch.arange(1, x.numel() + 1).reshape(x.shape) + number).to(x.dtype)
    return state.replace(step=torch.tensor(12))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ck.save(tmp_path / "12", state_of(planned()), extra={"seed": 1})
    return tmp_path / "12"


@pytest.fixture(params=[16, 1 << 20], ids=["small_window", "one_window"])
def window(request, monkeypatch):
    monkeypatch.setattr(byte_ranges, "WINDOW_BYTES", request.param)


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


# ------------------------------------------------------------------------------------------------------------- reshard
@slow
@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16, FP16_SCALED], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("axes", "strategy"),
    [({"dp": 2, "tp": 2}, fs.zero(3)), ({"dp": 3}, fs.zero(1)), ({"pp": 2, "replica": 2}, fs.hybrid()), ({}, None)],
    ids=["dp_tp", "dp3_zero1", "pp_hsdp", "one_rank"],
)
def test_a_resharded_checkpoint_loads_as_its_source(axes, strategy, precision, window, tmp_path):
    layout = planned(fs.zero(2), precision)
    ck.save(tmp_path / "a", state_of(layout), extra={"seed": 1})
    made = ck.reshard_checkpoint(tmp_path / "a", tmp_path / "b", axes, strategy)
    assert made == ck.metadata(tmp_path / "b") and made.extra == {"seed": 1} and made.step == 12
    assert made.layout["mesh"] == (axes or {"dp": 1})
    assert made.layout["strategy"] == str(strategy or fs.zero(2))
    assert_bitwise_equal(ck.load(tmp_path / "b", layout), ck.load(tmp_path / "a", layout))
    world = math.prod(axes.values())
    assert 1 <= sum(name.startswith("__") for name in made.files) <= world
    found, _ = from_metadata(tmp_path / "b", (tmp_path / "b/.metadata").read_bytes(), made)
    for path, stored in found.items():
        assert boxes.is_tiling([chunk.box for chunk in stored.chunks], stored.leaf.shape), path
    assert not ck.inspect(tmp_path / "b").damaged
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_files_of_ranks_are_about_as_large(tmp_path):
    layout = fs.plan_layout({"w": torch.empty(64, 64)}, fs.make_mesh(device="cpu"))
    ck.save(tmp_path / "a", fs.init_state(lambda key: {"w": torch.ones(64, 64)}, fs.sgd(0.1), fs.random.key(0), layout))
    made = ck.reshard_checkpoint(tmp_path / "a", tmp_path / "b", {"dp": 4})
    sizes = [file.bytes for name, file in made.files.items() if name.startswith("__")]
    assert len(sizes) == 4 and max(sizes) < 1.6 * min(sizes)


def test_reshard_replaces_a_checkpoint_and_nothing_else(saved, tmp_path):
    ck.reshard_checkpoint(saved, tmp_path / "b", {"dp": 2})
    ck.reshard_checkpoint(saved, tmp_path / "b", {"dp": 3})
    assert ck.metadata(tmp_path / "b").layout["ranks"] == 3
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    assert "it exists and is not a checkpoint" in refusal(ck.reshard_checkpoint, saved, tmp_path / "other", {"dp": 2})
    assert os.listdir(tmp_path / "other") == ["thesis.tex"]


@pytest.mark.parametrize(
    ("axes", "kind", "text"),
    [
        ({"dp": -1}, MeshError, "got an axis of size -1.\nPass every size: their product is the number of ranks."),
        ({"dp": 0}, MeshError, "got dp=0.\nA size is at least 1; one axis may be -1."),
        ({"tp": 2, "mp": 2}, MeshError, "got an unknown axis 'mp'. Axes are pp, replica, dp, ep, cp, tp."),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(axes, kind, text, saved, tmp_path):
    found = refusal(ck.reshard_checkpoint, saved, tmp_path / "b", axes, kind=kind)
    assert found.startswith(f"fs.checkpoint.reshard_checkpoint {text}")
    assert os.listdir(tmp_path) == ["12"]


def test_a_checkpoint_is_not_resharded_onto_itself(saved, tmp_path):
    (tmp_path / "link").symlink_to(saved)
    for target in (saved, tmp_path / "link"):
        assert refusal(ck.reshard_checkpoint, saved, target, {"dp": 2}) == (
            f"fs.checkpoint.reshard_checkpoint cannot write {saved} over itself.\nPass a different directory."
        )


def flip(folder: Path, name: str = "__0_0.distcp", at: int = -700) -> None:
    data = bytearray((folder / name).read_bytes())
    data[at] ^= 1
    (folder / name).write_bytes(data)


@pytest.mark.parametrize("make", ["reshard", "export"])
@pytest.mark.parametrize("trouble", ["damaged", "full"])
def test_a_failure_leaves_nothing_behind(make, trouble, saved, tmp_path, monkeypatch):
    if trouble == "damaged":
        flip(saved, at=2000)
    else:

        def full(*args: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Writer, "add", full)
    if make == "reshard":
        text = refusal(ck.reshard_checkpoint, saved, tmp_path / "b", {"dp": 2})
    else:
        text = refusal(fs.foreign.export, saved, tmp_path / "b", "dcp", what="all")
    assert trouble == "damaged" or "OSError: [Errno 28] No space left on device" in text
    assert os.listdir(tmp_path) == ["12"]


# -------------------------------------------------------------------------------------------------------------- export
@pytest.mark.parametrize("kind", FORMATS)
def test_every_leaf_is_exported_bit_by_bit(kind, saved, window, tmp_path):
    state = state_of(planned())
    main = {path: local_of(x) for path, x in fs.tree.named_leaves(state.params).items()}
    done = fs.foreign.export(saved, tmp_path / "out", kind, NAMES)
    found = read_back(kind, tmp_path / "out")
    expected = {path: x for path, x in main.items() if path not in NAMES}
    for i in range(2):
        expected |= {f"h.{i}.weight": main["blocks.w"][i].T, f"h.{i}.bias": main["blocks.b"][i]}
    assert {*found} == {*expected} and all(same_bits(found[name], x) for name, x in expected.items())
    assert done.tensors == len(expected) and done.format == kind
    assert f"{tmp_path}/out: 8 tensors, " in str(done)
    assert_bitwise_equal(
        fs.foreign.load_weights(tmp_path / "out", planned(), NAMES), state.replace(layout=planned()).params
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_a_whole_state_is_exported(kind, saved, tmp_path):
    fs.foreign.export(saved, tmp_path / "out", kind, what="all")
    found, tree = read_back(kind, tmp_path / "out"), ck.load_leaves(saved, [*ck.metadata(saved).tree])
    assert {*found} == {*tree} and all(same_bits(found[path], x) for path, x in tree.items())


def test_large_exports_are_several_files_with_an_index(saved, tmp_path):
    done = fs.foreign.export(saved, tmp_path / "out", "safetensors", max_file_bytes=100)
    shards = [name for name in done.files if name != "model.safetensors.index.json"]
    assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {*shards}
    found = read_back("safetensors", tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    weights = fs.foreign.open_weights(tmp_path / "out")
    for name, x in found.items():
        weights.read(name, boxes.full(x.shape), out := torch.empty_like(x))
        assert same_bits(out, x)


def test_an_export_writes_over_nothing(saved, tmp_path):
    (tmp_path / "out").touch()
    assert refusal(fs.foreign.export, saved, tmp_path / "out", "numpy") == (
        f"fs.foreign.export cannot write {tmp_path}/out.\n"
        "  format is 'numpy': formats are torch, safetensors, dcp\n"
        f"  {tmp_path}/out: the path exists, and is never overwritten\nChange these arguments."
    )


def test_a_name_that_torch_misreads_is_refused(saved, tmp_path):
    assert "torch.load reads a file that ends in .safetensors" in refusal(
        fs.foreign.export, saved, tmp_path / "out.safetensors", "torch"
    )


def test_names_that_do_not_fit_are_refused_with_every_reason(saved, tmp_path):
    names = {"table": "scale", "blocks.b": "{i}.{j}.{k}", "counts": fs.foreign.Transposed("counts"), "heads": "head"}
    names |= {"blocks.w": fs.foreign.Rows("h.{i}.w", (3, 4, 5)), "none": fs.foreign.Rows("none", ())}
    assert refusal(fs.foreign.export, saved, tmp_path / "out", "torch", names) == (
        "fs.foreign.export cannot name some tensors.\n"
        "  heads is in names, but matches no leaf of ours\n"
        "  blocks.b: '{i}.{j}.{k}': use {i}, {j}, {k} in this order, at most one per dim\n"
        "  blocks.w: 'h.{i}.w': 3 keys for rows, and 2 rows\n"
        "  counts: 'counts': nothing to transpose in [3]\n"
        "  none: 'none': 0 keys for rows, and no {i}\n"
        "  table: scale is also the name of params.scale\n"
        "Pass names={ours: theirs}, a unique name for each leaf, with {i} for the blocks of a stack."
    )


# ------------------------------------------------------------------------------------------------------------- inspect
def test_inspect_shows_what_is_there(saved):
    found = ck.inspect(saved)
    text = str(found)
    assert text.startswith(f"{saved}: whole\nstep 12, saved by fsharding ")
    assert "mesh dp=1 (1 ranks), strategy zero3" in text
    assert "\nparams.blocks.w        float32[2, 5, 3]  P()    120\n" in text
    plain = found.to_json()
    assert json.loads(json.dumps(plain)) == plain and plain["ok"] and plain["extra"] == {"seed": 1}
    assert plain["leaves"]["params.table"] == {"shape": [7, 3], "dtype": "float32", "spec": "P()", "bytes": 84}
    assert plain["file_bytes"] == sum((saved / name).stat().st_size for name in plain["files"])
    assert plain["leaf_bytes"] == sum(leaf["bytes"] for leaf in plain["leaves"].values())


def test_inspect_names_every_file_that_is_damaged(saved):
    ck.reshard_checkpoint(saved, saved.parent / "b", {"dp": 3})
    flip(saved.parent / "b", "__1_0.distcp")
    (saved.parent / "b" / "__2_0.distcp").unlink()
    damaged = ck.inspect(saved.parent / "b").damaged
    assert [row.split()[0] for row in damaged] == ["__1_0.distcp", "__2_0.distcp"]
    assert f"{saved.parent}/b: damaged\n  damaged: __1_0.distcp has the sha256 " in str(ck.inspect(saved.parent / "b"))


# -------------------------------------------------------------------------------------------------------- command line
def test_the_verbs(saved, tmp_path, capsys):
    status, out, _ = run(capsys, "inspect", saved)
    assert status == 0 and out == f"{ck.inspect(saved)}\n"
    status, out, _ = run(
        capsys, "reshard", saved, tmp_path / "b", "--mesh", "dp=2,tp=2", "--strategy", "zero1", "--json"
    )
    made = json.loads(out)
    assert status == 0 and made["layout"]["mesh"] == {"dp": 2, "tp": 2} and made["layout"]["strategy"] == "zero1"
    status, out, _ = run(capsys, "reshard", saved, tmp_path / "c", "--mesh", "dp=2")
    assert (status, out) == (0, f"{tmp_path}/c: step 12, {len(made_leaves(saved))} leaves, 3 files\n")
    (tmp_path / "names.json").write_text(
        json.dumps(
            {
                "blocks.w": {"transposed": "h.{i}.weight"},
                "blocks.b": {
                    "name": "h.{i}.b",
                    "rows": [4, "x"],
                },
            }
        )
    )
    command = ["export", tmp_path / "b", tmp_path / "out", "--format", "torch", "--names", tmp_path / "names.json"]
    status, out, _ = run(capsys, *command)
    assert status == 0 and out.startswith(f"{tmp_path}/out: 8 tensors, 1 files, ")
    assert {"h.1.weight", "h.4.b", "h.x.b"} <= {*torch.load(tmp_path / "out", weights_only=True)}
    status, out, _ = run(capsys, "export", saved, tmp_path / "st", "--format", "safetensors", "--what", "all", "--json")
    assert status == 0 and json.loads(out)["path"] == f"{tmp_path}/st"


def made_leaves(path: Path) -> dict:
    return ck.metadata(path).tree


def test_a_damaged_checkpoint_has_status_1_and_its_file_is_named(saved, capsys):
    flip(saved)
    status, out, _ = run(capsys, "inspect", saved, "--json")
    found = json.loads(out)
    assert status == 1 and not found["ok"] and found["damaged"][0].startswith("__0_0.distcp has the sha256 ")
    flip(saved, "manifest.json", 300)
    status, out, _ = run(capsys, "inspect", saved)
    assert status == 1 and "\n  damaged: manifest.json: " in out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["inspect", "{0}/nothing"], "ConfigError: fsharding inspect finds nothing at 1 of its paths."),
        (["inspect", "{0}/12/manifest.json"], "CheckpointError: fsharding inspect: fs.checkpoint.inspect finds no checkpoint at "),
        (["reshard", "{0}/12", "{0}/b", "--mesh", "dp"], "ConfigError: fsharding reshard cannot read 'dp' in --mesh dp."),
        (["reshard", "{0}/12", "{0}/b", "--mesh", "dp=2", "--strategy", "zero4"], "ConfigError: fsharding reshard knows no strategy"),
        (["export", "{0}/12", "{0}/12", "--format", "dcp"], "CheckpointError: fsharding export: fs.foreign.export cannot write"),
        (["export", "{0}/12", "{0}/b", "--format", "dcp", "--names", "{0}/no"], "ConfigError: fsharding export finds nothing at 1 of its paths."),
        (["export", "{0}/12", "{0}/b", "--format", "dcp", "--names", "{0}/12"], "ConfigError: fsharding export cannot read --names"),
    ],
)  # fmt: skip
def test_bad_arguments_have_status_2_and_one_message(args, text, saved, tmp_path, capsys):
    status, out, err = run(capsys, *(arg.format(tmp_path) for arg in args))
    assert status == 2 and not out and err.startswith(text) and "Traceback" not in err
    assert os.listdir(tmp_path) == ["12"]


# -------------------------------------------------------------------------------------------------------------- memory
MEBI = 1 << 20
LITTLE = """
import resource, sys
import torch
import fsharding as fs
from fsharding import checkpoint as ck
folder, allowed = sys.argv[1], int(sys.argv[2])
for kind in ("torch", "safetensors"):  # what is imported and compiled once is not counted
    fs.foreign.export(f"{folder}/small", f"{folder}/small.{kind}", kind)
    fs.foreign.open_weights(f"{folder}/small.{kind}").read("w", ((0, 1), (0, 1), (0, 1)), torch.empty(1, 1, 1))
ck.reshard_checkpoint(f"{folder}/small", f"{folder}/small.dp", {"dp": 2, "tp": 2})
held = {line.split(":")[0]: int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("Vm")}
resource.setrlimit(resource.RLIMIT_DATA, (held["VmData"] + allowed, -1))
try:
    torch.empty(allowed + (16 << 20), dtype=torch.uint8)
except RuntimeError:
    print("the limit holds")
ck.reshard_checkpoint(f"{folder}/large", f"{folder}/large.dp", {"dp": 2, "tp": 2})
for kind in ("torch", "safetensors"):  # dcp is written as a reshard is
    fs.foreign.export(f"{folder}/large", f"{folder}/large.{kind}", kind)
    weights = fs.foreign.open_weights(f"{folder}/large.{kind}")
    shape = weights.leaves["w"].shape
    out = torch.empty(1, shape[1], 8)
    weights.read("w", ((1, 2), (0, shape[1]), (64, 72)), out)
    assert float(out.sum()) == out.numel()
print("done")
"""


@full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rows", [25 * MEBI // 1024, 128 * MEBI // 1024])
def test_a_checkpoint_larger_than_the_memory_passes(rows, tmp_path):
    """One leaf, one box, of 200 MiB (1 GiB with -m full), through 96 MiB."""
    for name, size in (("small", 4), ("large", rows)):
        shape = (2, size, 1024)
        layout = fs.plan_layout(
            {"w": torch.empty(shape, device="meta")}, fs.make_mesh(device="cpu"), names={"w": ("layers", None, "heads")}
        )
        state = fs.init_state(
            lambda key, shape=shape: {"w": fs.random.full(shape, 1.0)}, fs.sgd(0.1), fs.random.key(0), layout
        )
        ck.save(tmp_path / name, state)
        del state
    allowed = 96 * MEBI
    assert sum(file.bytes for file in ck.metadata(tmp_path / "large").files.values()) > 2 * allowed
    command = [sys.executable, "-c", LITTLE, str(tmp_path), str(allowed)]
    where = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # What is freed goes back to the system; the stacks of threads would count.
    env = {**os.environ, "PYTHONPATH": where, "MALLOC_MMAP_THRESHOLD_": str(MEBI), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280, check=False)
    assert done.returncode == 0 and done.stdout.split("\n")[:2] == ["the limit holds", "done"], done.stderr
