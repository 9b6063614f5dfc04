"""Parts of checkpoints: records and boxes by hand, some leaves alone, layouts out of manifests, who writes what."""

import itertools
import math
import random
import warnings

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding import tree
from fsharding.base.errors import ConfigError, LayoutError
from fsharding.checkpoint import chunks
from fsharding.checkpoint import manifest as manifests
from fsharding.checkpoint.byte_ranges import pieces, span
from fsharding.checkpoint.loading import _wanted_leaves
from fsharding.checkpoint.manifest import METADATA
from fsharding.checkpoint.reader import Source, open_source
from fsharding.checkpoint.serialized_layout import names_from_plain, plain_names
from fsharding.checkpoint.state_leaves import StateLeaf, shares
from fsharding.checkpoint.writer import Writer, write_metadata
from fsharding.formats.precision import KEEP
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import Assigned, local_of
from fsharding.testing import assert_bitwise_equal
from fsharding.train.state import main_of
from tests.checkpoints import Wrapped, described, draws, planned, refusal, state_of
from tests.helpers import slow

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
]  # fmt: skip


def some(shape, dtype, seed=0):
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.manual_seed(seed))
    return raw.view(dtype).reshape(shape)


def written(folder, leaves):
    with Writer(folder, 0) as writer:
        for path, x in leaves.items():
            writer.add(path, tuple(x.shape), boxes.full(x.shape), x)
        part = writer.close()
    write_metadata(folder, [part])
    return part


# ------------------------------------------------------------------------------------------------------ Writer and Source
def test_every_dtype_and_stride_there_and_back(tmp_path):
    leaves = {str(dtype): some((3, 4), dtype) for dtype in DTYPES}
    wide = torch.arange(200.0).reshape(10, 20)
    leaves |= {
        "rows": wide[2:5],
        "columns": wide[:, 3:5],
        "turned": wide.t(),
        "scalar": wide[3, 4],
        "empty": wide[:0],
        "one": wide[3:4, 4:5],
    }
    leaves["grad"] = torch.ones(2, requires_grad=True)
    part = written(tmp_path, leaves)
    assert part.file == described(tmp_path / part.name)
    assert all(chunk.place.length < 2500 for chunk in part.chunks), (
        "a record holds its box and not the storage around it"
    )
    source = open_source(tmp_path, None)
    assert chunks.described(part.chunks) == chunks.described(source.located()), "values are where records have them"
    for path, x in leaves.items():
        out = torch.empty(x.shape, dtype=x.dtype)
        source.read(path, boxes.full(x.shape), out)
        assert_bitwise_equal(out, x.detach(), path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = {path: torch.zeros(x.shape, dtype=x.dtype) for path, x in leaves.items()}
        torch_dcp.load(again, checkpoint_id=tmp_path)
    assert_bitwise_equal(again, {path: x.detach() for path, x in leaves.items()})


def test_checksums_of_files_of_several_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("fsharding.checkpoint.writer.BLOCK", 5000)
    monkeypatch.setattr("fsharding.checkpoint.writer._PIECE", 1700)
    leaves = {f"{i}": torch.full((size,), float(i)) for i, size in enumerate((1, 300, 9000, 5, 1250, 2500, 0, 70))}
    part = written(tmp_path, leaves)
    file = part.file._replace(block=5000)
    monkeypatch.setattr(manifests, "BLOCK", 5000)
    assert file == described(tmp_path / part.name)._replace(block=5000)
    found = open_source(tmp_path, None)._inventory
    for order in (sorted(leaves), sorted(leaves, reverse=True)):
        source = Source(tmp_path, found, {part.name: file})
        for path in order:
            out = torch.zeros(leaves[path].shape)
            source.read(path, boxes.full(out.shape), out)
            assert torch.equal(out, leaves[path])


@pytest.mark.parametrize("seed", range(20))
def test_random_boxes(tmp_path, monkeypatch, seed):
    """Chunks of a random tiling are written, random boxes are read into random strides, in slabs of a few bytes."""
    monkeypatch.setattr("fsharding.checkpoint.byte_ranges.WINDOW_BYTES", 64)
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(0, 4)))
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    cuts = [sorted({0, n, *(draw.randint(0, n) for _ in range(2))}) for n in shape]
    tiles = [()]
    for ends in cuts:
        tiles = [(*tile, (a, b)) for tile in tiles for a, b in itertools.pairwise(ends)]
    parts = []
    for number in range(2):
        with Writer(tmp_path, number) as writer:
            for box in tiles[number::2]:
                writer.add("x", shape, box, whole[tuple(slice(*ends) for ends in box)])
            parts.append(writer.close())
    write_metadata(tmp_path, parts)
    source = open_source(tmp_path, None)
    for _ in range(20):
        box = tuple(tuple(sorted((draw.randint(0, n), draw.randint(0, n)))) for n in shape)
        size = boxes.shape_of(box)
        dtype = draw.choice([torch.float32, torch.float64])
        out = torch.full(size, -1, dtype=dtype)
        if draw.random() < 0.5:
            out = torch.full((*size[::-1], 2), -1, dtype=dtype)[..., 0].permute(tuple(reversed(range(len(size)))))
        source.read("x", box, out)
        assert torch.equal(out, whole[tuple(slice(*ends) for ends in box)].to(dtype))


@pytest.mark.parametrize("stride", [(100, 10, 1), (1, 8, 40), (8, 1, 40), (0, 0, 0)])
def test_pieces_are_small_and_cover(stride, monkeypatch):
    shape = (8, 5, 10)
    for limit in (1, 7, 40, 99, 1000):
        monkeypatch.setattr("fsharding.checkpoint.byte_ranges.WINDOW_BYTES", limit)
        seen = torch.zeros(shape)
        for piece in pieces(boxes.full(shape), 1, stride):
            assert span(boxes.shape_of(piece), stride) <= limit
            seen[boxes.relative(piece, boxes.full(shape))] += 1
        assert (seen == 1).all()


# ----------------------------------------------------------------------------------------------------------- load_leaves
def test_some_leaves(saved):
    state = state_of(planned())
    found = ck.load_leaves(saved, ["params.blocks", "params.table", "step"])
    assert [*found] == ["params.blocks.scale", "params.blocks.w", "params.table", "step"]
    want = {"params.table": state.params["table"], "params.blocks.w": state.params["blocks"]["w"]}
    for path, x in want.items():
        assert type(found[path]) is torch.Tensor
        assert_bitwise_equal(found[path], local_of(x))
    assert found["step"] == 12
    assert [*ck.load_leaves(saved, "key")] == ["key"]
    layout = planned()
    found = ck.load_leaves(saved, ["params.blocks", "opt_state.states.1.mu.table", "step"], layout)
    assert_bitwise_equal(found["params.blocks.w"], state.params["blocks"]["w"])
    assert_bitwise_equal(found["opt_state.states.1.mu.table"], state.opt_state.states[1].mu["table"])
    assert found["step"] == 12


def test_unknown_leaves(saved):
    text = (
        f"fs.checkpoint.load_leaves finds no such leaves in {saved}.\n"
        "  params.tabel: unknown. Did you mean 'params.table'?\n"
        "  zzz: unknown.\n"
        "fs.checkpoint.metadata(path).tree has all paths."
    )
    paths = ["params.tabel", "step", "zzz"]
    assert refusal(ck.load_leaves, saved, paths) == refusal(ck.load_leaves, saved, paths, planned()) == text
    assert "finds no checkpoint" in refusal(ck.load_leaves, saved / "x", "step")
    abstract = planned().with_mesh(fs.AbstractMesh(("dp",), (4,)))
    assert "cannot load onto the abstract mesh" in refusal(ck.load_leaves, saved, "step", abstract, kind=LayoutError)


def test_leaves_that_the_layout_lacks_are_refused_by_name(saved):
    layout = planned(model=lambda key: {"table": draws(key)["table"]})
    for paths in (["params.table", "params.blocks.w"], "params", ["step", "params.blocks"]):
        text = refusal(ck.load_leaves, saved, paths, layout)
        extra = [row for row in text.splitlines() if row.startswith("  params")]
        assert "  params.blocks.w is extra: float32[" in text and all("is extra" in row for row in extra)
        assert f"it is a checkpoint of another model; {len(extra)} leaves differ" in text
    assert_bitwise_equal(
        ck.load_leaves(saved, "params.table", layout)["params.table"], state_of(planned()).params["table"]
    )


def test_a_loss_scale_needs_no_layout_with_one(tmp_path):
    scaled = planned(precision=fs.Precision(params=torch.float16, loss_scale=fs.formats.LossScale(initial=8.0)))
    ck.save(tmp_path / "a", state_of(scaled))
    found = ck.load_leaves(tmp_path / "a", ["loss_scale", "step"], planned())
    assert found == {
        "loss_scale.scale": torch.tensor(8.0),
        "loss_scale.good_steps": torch.tensor(0),
        "step": torch.tensor(12),
    }
    assert ck.load(tmp_path / "a", planned(), cast=True).loss_scale is None


def test_cast(saved):
    layout, state = planned(precision=fs.Precision(params=torch.bfloat16)), state_of(planned())
    for call in (ck.load, lambda *args, **kwargs: ck.load_leaves(args[0], "params", args[1], **kwargs)):
        assert "it is a checkpoint of another precision; 5 leaves differ" in refusal(call, saved, layout)
    again = ck.load(saved, layout, cast=True)
    assert_bitwise_equal(local_of(again.params["table"]), local_of(state.params["table"]).bfloat16())
    assert_bitwise_equal(again.opt_state, state.opt_state)
    found = ck.load_leaves(saved, "params", layout, cast=True)
    assert found["params.table"].dtype == torch.bfloat16
    other = planned(model=lambda key: {**draws(key), "table": fs.random.zeros((8, 3))})
    assert "params.table is float32[7, 3]; wanted is float32[8, 3]" in refusal(ck.load, saved, other, cast=True)
    assert "another model; 1 leaves differ" in refusal(ck.load_leaves, saved, "params", other)


def test_partial_loads_read_no_more_than_they_need(tmp_path):
    big = torch.zeros(3 << 20)
    part = written(tmp_path, {"a": torch.ones(3), "big": big, "c": torch.ones(2)})
    (tmp_path / part.name).write_bytes(flipped((tmp_path / part.name).read_bytes(), 6 << 20))
    source = Source(tmp_path, open_source(tmp_path, None)._inventory, {part.name: part.file})
    source.read("a", ((0, 3),), torch.zeros(3))
    source.read("c", ((0, 2),), torch.zeros(2))
    source.read("big", ((0, 100),), torch.zeros(100))
    text = refusal(source.read, "big", ((0, 3 << 20),), torch.zeros(3 << 20))
    assert f"{part.name} has the sha256" in text and "in block 2 of 4" in text


def flipped(data, at):
    return bytes([*data[:at], data[at] ^ 1]) + data[at + 1 :] if at < 100 else b"".join([data[:at], bytes([data[at] ^ 1]), data[at + 1 :]])  # fmt: skip


# ------------------------------------------------------------------------------------------------------- manifests, plans
@pytest.mark.parametrize(
    "strategy", [fs.zero(1), fs.zero(3), fs.hybrid(opt_state=True), fs.hybrid(fs.zero(2), grads=True)]
)
@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16, fs.FP16])
def test_a_layout_comes_out_of_a_manifest(tmp_path, strategy, precision):
    names = {
        "table": ("vocab", "embed"), "blocks": {"w": ("layers", "heads", "embed"), "scale": ()},
        "pair": [("mlp",), (None, None)], "counts": (None,),
    }  # fmt: skip
    layout = planned(strategy, precision, names=names, frozen=("pair",))
    ck.save(tmp_path / "a", state_of(layout))
    manifest = ck.metadata(tmp_path / "a")
    again = ck.layout_of(manifest, layout.mesh)
    assert again == layout
    assert hash(again.rules) == hash(layout.rules)
    mesh = fs.AbstractMesh(("pp", "dp", "tp"), (2, 4, 2))
    assert ck.layout_of(manifest, mesh, fs.zero(2)) == layout.with_mesh(mesh).with_strategy(fs.zero(2))
    assert_bitwise_equal(ck.load(tmp_path / "a", again), state_of(layout))


FORMATS = ["TENSORWISE", "ROWWISE", "E4M3_1x128", "E4M3_128x128", "MXFP8", "MXFP8_E5M2", "MXFP4", "NVFP4"]


@slow
@pytest.mark.parametrize("strategy", [fs.zero(1), fs.zero(3)])
def test_formats_come_out_of_a_manifest(tmp_path, strategy):
    """Of weights and of gradients, and which leaves have none; and the main parameters are those that were saved."""
    names = {"table": ("vocab", "embed"), "blocks": {"w": ("layers", "heads", "embed"), "scale": ()},
             "pair": [("mlp",), (None, None)], "counts": (None,)}  # fmt: skip
    for number, name in enumerate(FORMATS):
        format = getattr(fs.formats, name)
        precision = fs.Precision(
            params=torch.float32, compute=torch.bfloat16, gather=format.with_rounding("stochastic" if number % 2 else "nearest"),
            reduce=format if number % 2 else torch.bfloat16, keep=("pair", "blocks[-1]") if number % 3 else KEEP,
        )  # fmt: skip
        layout = planned(strategy, precision, names=names)
        ck.save(tmp_path / name, state := state_of(layout))
        manifest = ck.metadata(tmp_path / name)
        again = ck.layout_of(manifest, layout.mesh)
        assert again == layout and again.precision == precision
        assert manifest.layout["precision"]["gather"]["dtype"] == str(format.dtype).removeprefix("torch.")
        loaded = ck.load(tmp_path / name, again)
        assert_bitwise_equal(main_of(loaded), main_of(state))
        if not precision.gather.stochastic:  # the bits of a stochastic one follow from the step, which was set here
            assert_bitwise_equal(loaded.params, state.params)
    manifest.layout["precision"]["gather"]["scale"] = "e5m2"
    with pytest.raises(ConfigError, match="scale='e5m2': use one of float32, e8m0, e4m3"):
        ck.layout_of(manifest, layout.mesh)


def test_how_weights_are_computed_with_comes_out_of_a_manifest(tmp_path):
    names = {"table": ("vocab", "embed"), "blocks": {"w": ("layers", "heads", "embed"), "scale": ()},
             "pair": [("mlp",), (None, None)], "counts": (None,)}  # fmt: skip
    precision = fs.Precision(
        params=torch.float32, compute=fs.formats.MXFP8, activations=torch.float16, strict=True, columnwise=("w", "w*")
    )
    layout = planned(fs.zero(3), precision, names=names)
    ck.save(tmp_path / "a", state_of(layout))
    assert ck.layout_of(ck.metadata(tmp_path / "a"), layout.mesh).precision == precision


def test_a_manifest_of_before_there_were_formats(tmp_path):
    layout = planned(fs.zero(1), fs.BF16)
    ck.save(tmp_path / "a", state_of(layout))
    manifest = ck.metadata(tmp_path / "a")
    roles = manifest.layout["precision"]
    assert {*roles} == {"params", "compute", "reduce", "grads", "moments", "loss_scale"}, (
        "as it was, where none is asked for"
    )
    assert ck.layout_of(manifest, layout.mesh) == layout


def test_dim_names_as_plain_data():
    for names in (None, (), ("layers", None, "embed")):
        assert names_from_plain(plain_names(names)) == names
    with pytest.raises(ValueError, match="not a dim name"):
        names_from_plain([3])


def test_a_manifest_without_a_layout(saved):
    manifest = ck.metadata(saved)
    mesh = planned().mesh
    for gone in ("params", "structure", "rules", "cuts", "precision", "frozen"):
        manifest.layout.pop(gone)
        assert "fs.checkpoint.layout_of finds no layout in the manifest." in refusal(ck.layout_of, manifest, mesh)
    inner = {"namedtuple": "mine.Model", "fields": {"w": "leaf"}}
    manifest.layout.update(ck.metadata(saved).layout, structure=inner)
    assert refusal(ck.layout_of, manifest, mesh).startswith(
        "fs.checkpoint.layout_of cannot rebuild the parameters from the manifest alone.\n  params is a mine.Model(w);"
    )


def test_parameters_in_a_class_of_the_user_are_saved_all_the_same(tmp_path):
    layout = planned(model=lambda key: Wrapped({"a": fs.random.zeros((3,))}, fs.random.zeros((2,))))
    leaves = {
        path: StateLeaf(x.shape, None, torch.zeros(x.shape))
        for path, x in tree.named_leaves({"w": torch.ones(2)}).items()
    }
    assert shares(leaves, range(3)) == {"w": {((0, 2),): 0}}
    assert {"params.inner.a", "params.mean"} < set(
        _wanted_leaves(layout, ck.Manifest(0, {}, {}, None, {}, None, "", ""), ())
    )


@pytest.mark.parametrize("axes", [{"dp": 4}, {"replica": 2, "dp": 2}, {"pp": 2, "tp": 2}])
def test_shares_are_of_holders_and_even(axes):
    names, sizes = tuple(axes), tuple(axes.values())
    mesh = fs.AbstractMesh(names, sizes)
    shardings = [
        fs.NamedSharding(mesh),
        fs.NamedSharding(mesh, fs.P(None, names[-1])),
        fs.NamedSharding(mesh, fs.P(names)),
    ]
    shardings.append(fs.NamedSharding(mesh, assigned=(Assigned.indices(names[0], 0, [(i,) for i in range(sizes[0])]),)))
    leaves = {}
    for i, sharding in enumerate(shardings * 4):
        shape = (sizes[0], 8 + i) if sharding.assigned else (7, 8 + i)
        leaves[f"{i}"] = StateLeaf(shape, sharding, torch.zeros(sharding.local_shape(shape)))
    leaves["plain"] = StateLeaf((2,), None, torch.zeros(2))
    found = shares(leaves, range(mesh.size))
    load = [0] * mesh.size
    for path, x in leaves.items():
        covered = 0
        for box, writer in found[path].items():
            held = [boxes.full(x.shape)] if x.sharding is None else x.sharding.boxes(x.shape, mesh.coordinate(writer))
            assert held.count(box) == 1
            covered += boxes.volume(box)
            load[writer] += boxes.volume(box)
        assert covered == math.prod(x.shape), path
    assert max(load) - min(load) <= 200
    assert METADATA == ".metadata"
