"""Weights of other programs in one process: every format and dtype bit by bit, names, refusals by name, bounded memory."""

import functools
import json
import os
import pickle
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn

import fsharding as fs
from fsharding.base.errors import LayoutError
from fsharding.checkpoint import byte_ranges
from fsharding.foreign.name_map import parts, parts_by_leaf
from fsharding.sharding import boxes
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal
from tests import checkpoints
from tests.checkpoints import FORMATS, refusal, same_bits, weight_draws

ROOT = Path(__file__).resolve().parents[3]
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def every_dtype() -> dict[str, torch.Tensor]:
    """A matrix, a scalar and an empty tensor of each dtype, with bits that a cast would lose."""
    found: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (35 * dtype.itemsize,), generator=generator)
        values = raw.to(torch.uint8).view(dtype)
        name = str(dtype).removeprefix("torch.")
        found |= {name: values.reshape(5, 7).clone(), f"{name}.scalar": values[3].clone()}
        found[f"{name}.empty"] = torch.empty(0, 3, dtype=dtype)
    return found


def write(kind: str, path: Path, tensors: dict) -> Path:
    """What other programs write."""
    if kind == "torch":
        torch.save(tensors, path)
    elif kind == "safetensors":
        safetensors.torch.save_file(tensors, path)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            torch_dcp.save(tensors, checkpoint_id=path)
    return path


# ------------------------------------------------------------------------------------------------------------- reading
@pytest.mark.parametrize("window", [16, 1 << 20])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_dtype_and_any_slice_is_read_bit_by_bit(kind, window, tmp_path, monkeypatch):
    monkeypatch.setattr(byte_ranges, "WINDOW_BYTES", window)
    tensors = every_dtype()
    weights = fs.foreign.open_weights(write(kind, tmp_path / "weights", tensors))
    assert weights.format == kind
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in weights.leaves.items()} == {
        name: (tuple(x.shape), x.dtype) for name, x in tensors.items()
    }
    for name, x in tensors.items():
        out = torch.empty_like(x)
        weights.read(name, boxes.full(x.shape), out)
        assert same_bits(out, x), name
        if x.ndim and x.numel():
            out = torch.empty(4, 2, dtype=x.dtype).T
            weights.read(name, ((1, 3), (2, 6)), out)
            assert same_bits(out, x[1:3, 2:6]), name


def test_a_state_dict_may_be_nested_strided_shared_and_wrapped(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    model = {"module.w": base.t(), "module.v": base[1:, ::2], "module.tied": base, "module.p": nn.Parameter(base)}
    optimizer = {"state": {0: {"exp_avg": base + 1, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
    torch.save({"model": model, "optimizer": optimizer, "epoch": 7}, tmp_path / "weights")
    weights = fs.foreign.open_weights(tmp_path / "weights")
    assert [*weights.leaves] == [
        "model.w", "model.v", "model.tied", "model.p", "optimizer.state.0.exp_avg", "optimizer.state.0.step"
    ]  # fmt: skip
    assert weights.others == ("optimizer.param_groups.0.lr", "epoch")
    out = torch.empty(6, 2)
    weights.read("model.w", ((0, 6), (1, 3)), out)
    assert torch.equal(out, base.t()[:, 1:3])
    out = torch.empty(2, 3)
    weights.read("model.v", ((1, 3), (0, 3)), out)
    assert torch.equal(out, base[2:, ::2])
    assert [*fs.foreign.open_weights(tmp_path / "weights", "model.").leaves] == ["w", "v", "tied", "p"]


def test_the_state_dict_of_a_wrapped_module_has_the_names_of_the_module(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.save({f"module.{name}": x for name, x in model.state_dict().items()}, tmp_path / "weights")
    assert {*fs.foreign.open_weights(tmp_path / "weights").leaves} == {*model.state_dict()}


@pytest.mark.parametrize("prefix", ["module._orig_mod.", "_orig_mod.module."])
def test_nested_wrappers_leave_the_names_of_the_module(prefix, tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    wrapped = {f"{prefix}{name}": x for name, x in model.items()}
    torch.save(
        {"model": wrapped, "part": {"module.a": torch.ones(1), "module.module.b": torch.ones(1)}}, tmp_path / "w"
    )
    weights = fs.foreign.open_weights(tmp_path / "w")
    assert [*weights.leaves] == [*(f"model.{name}" for name in model), "part.a", "part.module.b"]
    weights.read("model.0.weight", ((0, 2), (0, 3)), out := torch.empty(2, 3))
    assert torch.equal(out, model["0.weight"])


def test_a_module_of_the_model_may_be_called_as_a_wrapper_is(tmp_path):
    torch.save({"module.module.w": torch.ones(1)}, tmp_path / "w")
    assert [*fs.foreign.open_weights(tmp_path / "w").leaves] == ["module.w"]


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_several_files_are_read_through_their_index(kind, tmp_path):
    tensors = every_dtype()
    names = sorted(tensors)
    table = {}
    for number, part in enumerate((names[:7], names[7:])):
        write(kind, tmp_path / f"part-{number}", {name: tensors[name] for name in part})
        table |= dict.fromkeys(part, f"part-{number}")
    (tmp_path / "model.index.json").write_text(json.dumps({"weight_map": table}))
    for path in (tmp_path, tmp_path / "model.index.json"):
        weights = fs.foreign.open_weights(path)
        assert {*weights.leaves} == {*tensors}
        for name, x in tensors.items():
            weights.read(name, boxes.full(x.shape), out := torch.empty_like(x))
            assert same_bits(out, x)


# ------------------------------------------------------------------------------------------------- what is refused there
class Bomb:
    def __reduce__(self):
        return os.system, ("true",)


def _bad_index(name: str):
    def make(path: Path) -> None:
        path.mkdir()
        write("safetensors", path.parent / "real", {"w": torch.ones(2)})
        (path / "link").symlink_to(path.parent / "real")
        os.mkfifo(path / "fifo")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))

    return make


def _cut(kind: str):
    def make(path: Path) -> None:
        write(kind, path, {"w": torch.ones(1000)})
        os.truncate(path, 2000)

    return make


def _two_files(path: Path) -> None:
    path.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        write("safetensors", path / name, {"w": torch.ones(2)})


def _metadata(found: object):
    def make(path: Path) -> None:
        path.mkdir()
        (path / ".metadata").write_bytes(pickle.dumps(found))

    return make


def _raw_safetensors(entry: dict):
    def make(path: Path) -> None:
        text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    return make


ANY = "Pass a torch.save file of a state dict, a directory of torch DCP, or safetensors."
BESIDE = "Put every file next to the index; links may only point inside the same model of a Hub cache."
REFUSALS = {
    "nothing": (lambda path: None, ["  there is no such file or directory", ANY]),
    "text": (
        lambda path: path.write_text("hello, world"),
        ["  its first bytes match no supported format", ANY],
    ),
    "empty_file": (lambda path: path.touch(), ["  its first bytes match no supported format", ANY]),
    "empty_directory": (Path.mkdir, ["  it has no .metadata, and 0 .safetensors files and no index", ANY]),
    "no_index": (_two_files, ["  it has no .metadata, and 2 .safetensors files and no index", ANY]),
    "old_torch": (
        lambda path: torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False),
        [
            "  it is in torch's format before 1.6, or a plain pickle",
            "Load it with torch.load(weights_only=True) and torch.save it again.",
        ],
    ),
    "a_tensor": (
        lambda path: torch.save(torch.ones(2), path),
        ["  it holds a tensor, not a state dict", ANY],
    ),
    "up": (_bad_index("../real"), ["  ../real: isn't a plain file name", BESIDE]),
    "absolute": (_bad_index("/etc/passwd"), ["  /etc/passwd: isn't a plain file name", BESIDE]),
    "link": (_bad_index("link"), ["  link: is a link that leads out of {}", BESIDE]),
    "no_plain_file": (_bad_index("fifo"), ["  fifo: isn't a plain file", BESIDE]),
    "itself": (
        _bad_index("model.safetensors.index.json"),
        ["  model.safetensors.index.json: is an index itself", BESIDE],
    ),
    "absent": (_bad_index("absent"), ["  absent: is missing", BESIDE]),
    "no_name": (_bad_index(3), ["  3: isn't a plain file name", BESIDE]),  # type: ignore[arg-type]
    "cut_safetensors": (
        _cut("safetensors"),
        ["  w ends at byte 4,072 of 2,000", "It is truncated: download it again."],
    ),
    "odd_dtype": (_raw_safetensors({"dtype": 4}), ["  w: its dtype isn't a string", ANY]),
    "odd_offsets": (
        _raw_safetensors({"data_offsets": [0, 4]}),
        ["  w: {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 4]} contradicts itself", ANY],
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_cannot_be_read_is_refused_by_name(case, tmp_path):
    make, rows = REFUSALS[case]
    make(path := tmp_path / "weights")
    text = refusal(fs.foreign.open_weights, path)
    file = path / "model.safetensors.index.json" if rows[-1] == BESIDE else path
    assert text == "\n".join([f"fs.foreign.open_weights cannot read {file}.", *rows]).replace("{}", str(path))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: torch.save({"w": Bomb()}, path),
        _metadata(Bomb()),
        _cut("torch"),
        _metadata({"w": 1}),
        lambda path: path.write_bytes((10**9).to_bytes(8, "little") + b"{"),
        lambda path: path.write_text('{"weight_map": 3}'),
    ],
    ids=["code_in_torch", "code_in_metadata", "cut_torch", "no_metadata", "long_header", "no_table"],
)
def test_nothing_runs_and_nothing_is_guessed(make, tmp_path, monkeypatch):
    make(path := tmp_path / "weights")
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("code ran"))
    text = refusal(fs.foreign.open_weights, path)
    assert str(path) in text or "posix.system" in text


def test_a_file_that_shrinks_is_an_error(tmp_path):
    weights = fs.foreign.open_weights(write("safetensors", tmp_path / "weights", {"w": torch.ones(1000)}))
    os.truncate(tmp_path / "weights", 2000)
    text = refusal(weights.read, "w", ((0, 1000),), torch.empty(1000))
    assert "w: the file ends at byte 2,000, before the tensor does" in text


# --------------------------------------------------------------------------------------------------------------- names
def test_names_cut_stacks_and_transpose():
    found = list(parts("layers.{i}.w", (2, 3, 4)))
    assert [(part.name, part.box, part.shape) for part in found] == [
        ("layers.0.w", ((0, 1), (0, 3), (0, 4)), (3, 4)), ("layers.1.w", ((1, 2), (0, 3), (0, 4)), (3, 4))
    ]  # fmt: skip
    (part,) = parts(fs.foreign.Transposed("w"), (5, 3, 4))
    assert part.shape == (5, 4, 3) and part.ours(((0, 5), (1, 2), (0, 3))) == ((0, 5), (0, 3), (1, 2))
    assert part.there(((0, 5), (0, 3), (1, 2))) == ((0, 5), (1, 2), (0, 3))
    experts = [part.name for part in parts("layers.{i}.experts.{j}.w", (2, 2, 3))]
    assert experts == [f"layers.{i}.experts.{j}.w" for i in (0, 1) for j in (0, 1)]
    shapes = {"a": (1,), "c": (1,)}
    named = [parts_by_leaf(names, shapes, []) for names in (None, {"a": "b"}, str.upper)]
    assert [[part.name for own in leaves.values() for part in own] for leaves in named] == [
        ["a", "c"],
        ["b", "c"],
        ["A", "C"],
    ]


MODEL_NAMES = {"blocks.w": fs.foreign.Transposed("h.{i}.mlp.weight"), "blocks.b": "h.{i}.mlp.bias", "table": "wte"}


planned = functools.partial(checkpoints.planned, model=weight_draws)


def optimizer():
    return fs.adamw(1e-2)


def foreign(state) -> dict[str, torch.Tensor]:
    """The main parameters under the names of another program."""
    main = {path: local_of(x) for path, x in fs.tree.named_leaves(state.params).items()}
    found = {"wte": main["table"], "scale": main["scale"], "counts": main["counts"]}
    for i in range(2):
        found[f"h.{i}.mlp.weight"] = main["blocks.w"][i].T.contiguous()
        found[f"h.{i}.mlp.bias"] = main["blocks.b"][i].contiguous()
    return found


@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_starts_from_weights_as_from_the_same_draws(kind, level, precision, tmp_path):
    layout = planned(fs.zero(level), precision)
    begun = fs.init_state(weight_draws, optimizer(), fs.random.key(3), layout)
    path = write(
        kind, tmp_path / "weights", foreign(fs.init_state(weight_draws, optimizer(), fs.random.key(3), planned()))
    )
    params = fs.foreign.load_weights(path, layout, MODEL_NAMES)
    assert_bitwise_equal(fs.state_from_params(params, optimizer(), fs.random.key(3), layout), begun)


def test_moments_are_read_into_a_tree_like_them(tmp_path):
    state = fs.init_state(weight_draws, optimizer(), fs.random.key(3), planned())
    expected = fs.tree.map(lambda x: x + 4, state.opt_state)
    saved = {f"optim.{path}": local_of(x) for path, x in fs.tree.named_leaves(expected).items()}
    torch.save(saved | {"model.other": torch.ones(2)}, tmp_path / "weights")
    found = fs.foreign.load_weights(tmp_path / "weights", state.opt_state, lambda path: f"optim.{path}", extra="ignore")
    assert_bitwise_equal(found, expected)


def test_other_dtypes_are_cast_when_asked(tmp_path):
    state = fs.init_state(weight_draws, optimizer(), fs.random.key(3), planned())
    narrow = {name: x.bfloat16() if x.is_floating_point() else x for name, x in foreign(state).items()}
    torch.save(narrow, tmp_path / "weights")
    found = fs.foreign.load_weights(tmp_path / "weights", planned(), MODEL_NAMES, cast=True)
    assert torch.equal(local_of(found["table"]), narrow["wte"].float())


def test_weights_that_do_not_fit_are_refused_with_every_reason(tmp_path):
    state = fs.init_state(weight_draws, optimizer(), fs.random.key(3), planned())
    tensors = foreign(state)
    del tensors["h.1.mlp.bias"]
    tensors |= {"h.0.mlp.weight": torch.ones(5, 3), "wte": tensors["wte"].half(), "spare": torch.ones(2)}
    torch.save(tensors, tmp_path / "weights")
    names = MODEL_NAMES | {"scale": "{i}.scale", "heads": "head"}
    assert refusal(fs.foreign.load_weights, tmp_path / "weights", planned(), names) == (
        f"fs.foreign.load_weights cannot use {tmp_path}/weights: its tensors do not match.\n"
        "  heads is in names, but matches no leaf of ours\n"
        "  scale: '{i}.scale': use {i}, {j}, {k} in this order, at most one per dim\n"
        "  blocks.b: h.1.mlp.bias is missing; wanted is float32[3]\n"
        "  blocks.w: h.0.mlp.weight is float32[5, 3], wanted is float32[3, 5]\n"
        "  table: wte is float16[7, 3], wanted is float32[7, 3]\n"
        "  scale is extra: float32[]\n"
        "  spare is extra: float32[2]\n"
        "Pass their names in the files, names={ours: theirs}; cast=True casts; extra='ignore' skips extra ones."
    ).replace("8 tensors", "7 tensors")


def test_weights_below_a_prefix_are_found_with_it(tmp_path):
    state = fs.init_state(weight_draws, optimizer(), fs.random.key(3), planned())
    torch.save({"model": foreign(state), "optimizer": {"exp": torch.ones(2)}}, tmp_path / "weights")
    text = refusal(fs.foreign.load_weights, tmp_path / "weights", planned(), MODEL_NAMES)
    assert text.endswith("extra='ignore' skips extra ones; prefix='model.' reads the names below it.")
    found = fs.foreign.load_weights(tmp_path / "weights", planned(), MODEL_NAMES, prefix="model.")
    assert_bitwise_equal(found, fs.main_params(state.params, state.layout) | {"counts": state.params["counts"]})


def test_an_abstract_mesh_is_refused(tmp_path):
    layout = fs.plan_layout(weight_draws(fs.random.key(0)), fs.AbstractMesh(("dp",), (2,)))
    assert refusal(fs.foreign.load_weights, tmp_path, layout, kind=LayoutError) == (
        "fs.foreign.load_weights cannot load onto the abstract mesh {dp: 2}.\nPlan the layout on a mesh of fs.make_mesh."
    )
