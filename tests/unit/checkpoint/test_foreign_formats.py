"""Files that torch and safetensors write and that hold more than plain tensors: listed, read, or named with a way round."""

import json
import sys
import types
import warnings
from typing import NamedTuple

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import fsharding as fs
from fsharding.base.errors import CheckpointError
from fsharding.interop import hf
from fsharding.sharding.named_sharding import LeafType
from fsharding.testing import run_ranks
from tests.helpers import refusal

W = torch.arange(6.0).view(2, 3)
pytestmark = pytest.mark.filterwarnings("ignore")


def loaded(weights, name, dtype=torch.float32, box=None):
    """A tensor, or a box of it, as it is read."""
    box = box or tuple((0, n) for n in weights.leaves[name].shape)
    weights.read(name, box, out := torch.empty([b - a for a, b in box], dtype=dtype))
    return out


# ---------------------------------------------------------------------------------------------------------- safetensors
ONE_BYTE = [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2]


@pytest.mark.parametrize("dtype", ONE_BYTE, ids=str)
def test_every_dtype_that_torch_and_safetensors_have_is_read(dtype, tmp_path):
    x = torch.arange(24, dtype=torch.uint8).view(4, 6).view(dtype)
    safetensors.torch.save_file({"x": x, "w": W}, tmp_path / "a.safetensors")
    want = safetensors.torch.load_file(tmp_path / "a.safetensors")["x"]
    weights = fs.foreign.open_weights(tmp_path / "a.safetensors")
    assert weights.leaves["x"] == LeafType(tuple(want.shape), want.dtype)
    found = loaded(weights, "x", dtype, ((1, 3), (2, 5)))
    assert torch.equal(found.view(torch.uint8), want.view(torch.uint8)[1:3, 2:5])
    assert torch.equal(loaded(weights, "w"), W)
    if dtype == torch.float4_e2m1fn_x2:
        why = "it is float4_e2m1fn_x2[4, 6]: 4-bit values, two per element, which torch cannot cast"
        assert why in refusal(loaded, weights, "x", kind=CheckpointError)
        text = refusal(fs.foreign.load_weights, tmp_path, {"x": torch.empty(4, 6)}, extra="ignore", cast=True)
        assert f"x: x is not read: {why}" in text and "cast=True" not in text
        like = {"x": torch.empty(4, 6, dtype=dtype)}
        same = fs.foreign.load_weights(tmp_path, like, extra="ignore")["x"]
        assert torch.equal(same.view(torch.uint8), want.view(torch.uint8))
    else:
        assert torch.equal(loaded(weights, "x").nan_to_num(), want.float().nan_to_num())


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F99"])
def test_a_dtype_that_torch_lacks_makes_one_tensor_unreadable(dtype, tmp_path):
    header = {"x": {"dtype": dtype, "shape": [4, 2], "data_offsets": [8, 14]}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}  # fmt: skip
    text = json.dumps(header).encode()
    data = torch.tensor([1.0, 2.0]).numpy().tobytes() + bytes(6)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    weights = fs.foreign.open_weights(tmp_path)
    assert [*weights.leaves] == ["w"] and loaded(weights, "w").tolist() == [1.0, 2.0]
    why = f"it is {dtype}[4, 2], a dtype that torch lacks: save it in one that torch has"
    assert weights.unread == {"x": why}
    assert why in refusal(weights.read, "x", ((0, 4), (0, 2)), torch.empty(4, 2), kind=CheckpointError)
    like = {"w": torch.empty(2)}
    assert f"  x is extra: {why}" in refusal(fs.foreign.load_weights, tmp_path, like, kind=CheckpointError)
    assert fs.foreign.load_weights(tmp_path, like, extra="ignore")["w"].tolist() == [1.0, 2.0]
    wanted = {"a": torch.empty(4, 2)}
    text = refusal(fs.foreign.load_weights, tmp_path, wanted, {"a": "x"}, extra="ignore", kind=CheckpointError)
    assert f"  a: x is not read: {why}" in text
    layout = fs.plan_layout(wanted, fs.make_mesh(device="cpu"))
    assert f"  a: x is not read: {why}" in refusal(hf.load, tmp_path, layout, {"a": "x"}, kind=CheckpointError)


# ------------------------------------------------------------------------------------------------------------ torch.save
class Coded(torch.Tensor):
    """A tensor of a library that is not here when the file is read."""

    @staticmethod
    def __new__(cls, data):
        self = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        self.data_ = data
        return self

    __torch_dispatch__ = None

    def __reduce_ex__(self, protocol):
        args = (type(self), torch.float32, tuple(self.shape), (3, 1), 0, torch.strided, torch.device("cpu"), False)
        func = torch._utils._rebuild_wrapper_subclass
        return torch._tensor._rebuild_from_type_v2, (func, type(self), args, {"data_": self.data_})


@pytest.fixture
def coded(monkeypatch):
    """A tensor whose class says that it is of torchao, which is imported nowhere while a file is read."""
    module = types.ModuleType("torchao")
    module.Coded = Coded
    monkeypatch.setitem(sys.modules, "torchao", module)
    monkeypatch.setattr(Coded, "__module__", "torchao")
    return Coded(torch.zeros(2, 3))


ODD = {
    "conj": (lambda: torch.ones(2, dtype=torch.complex64).conj(), "stored with the flag conj: save x.resolve_conj()"),
    "neg": (
        lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
        "stored with the flag neg: save x.resolve_conj()",
    ),
    "sparse": (lambda: torch.eye(2).to_sparse(), "it is sparse: save x.to_dense()"),
    "sparse rows": (lambda: torch.eye(2).to_sparse_csr(), "it is sparse: save x.to_dense()"),
    "sparse parameter": (lambda: torch.nn.Parameter(torch.eye(2).to_sparse()), "it is sparse: save x.to_dense()"),
    "meta": (lambda: torch.empty(3, device="meta"), "it is on the meta device, without values"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "it is a nested tensor"),
}


def check_odd(folder, odd, why):
    torch.save({"model": {"x": odd, "w": W}, "step": 3}, folder / "a.pt")
    weights = fs.foreign.open_weights(folder / "a.pt", "model.")
    assert [*weights.leaves] == ["w"] and [*weights.unread] == ["x"] and weights.others == ("step",)
    assert why in weights.unread["x"] and torch.equal(loaded(weights, "w"), W)
    assert why in refusal(weights.read, "x", ((0, 1),), torch.empty(1), kind=CheckpointError)


@pytest.mark.parametrize("name", ODD)
def test_tensors_of_other_kinds_leave_the_rest_readable(name, tmp_path):
    make, why = ODD[name]
    check_odd(tmp_path, make(), why)


def test_tensors_of_other_classes_leave_the_rest_readable(coded, tmp_path):
    check_odd(tmp_path, coded, "it is a torchao.Coded: save x.dequantize()")


class Tagged(torch.Tensor):
    """A tensor of a user's class, with the values of a plain one."""


def test_tensors_of_a_class_of_the_user_leave_the_rest_readable(tmp_path):
    named = f"{Tagged.__module__}.Tagged"
    check_odd(tmp_path, W.as_subclass(Tagged), f"it is a {named}: save x.as_subclass(torch.Tensor)")
    torch.save({"x": W.as_subclass(Tagged), "other": Other()}, tmp_path / "b.pt")
    text = refusal(fs.foreign.open_weights, tmp_path / "b.pt", kind=CheckpointError)
    assert f"it names {Other.__module__}.Other, which no state dict needs; nothing of it was run" in text


class Other:
    """No tensor."""


# ------------------------------------------------------------------------------------------------------------------- DCP
class Zstd(StreamTransformExtension):
    """Writes what it is given under the name of torch's own compression, which needs a package."""

    @staticmethod
    def from_descriptor(version):
        return Zstd()

    @staticmethod
    def registry_name():
        return "stream.zstd"

    def get_descriptor(self):
        return "stream.zstd/1"

    def transform_to(self, output):
        return output

    def transform_from(self, input):
        return input


def save(state, folder, **options):
    torch_dcp.save(state, storage_writer=torch_dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def test_compressed_chunks_are_named(tmp_path):
    weights = fs.foreign.open_weights(save({"w": W, "step": 3}, tmp_path / "a", _extensions=[Zstd()]))
    assert not weights.leaves and [*weights.unread] == ["w"]
    assert weights.unread["w"].startswith(
        "it was written through stream.zstd/1: load it with torch and save it without"
    )
    text = refusal(fs.foreign.load_weights, tmp_path / "a", {"w": W}, kind=CheckpointError)
    assert "  w: w is not read: it was written through stream.zstd/1" in text


def test_records_of_other_classes_are_no_attempt_to_run_code(coded, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_dcp.filesystem, "_write_item", written_whole(coded))
    weights = fs.foreign.open_weights(save({"x": W, "w": W}, tmp_path / "a"))
    assert [*weights.leaves] == ["w"] and torch.equal(loaded(weights, "w"), W)
    assert weights.unread == {"x": "it is a torchao.Coded: save x.dequantize(), or another plain tensor"}
    wanted = refusal(fs.foreign.load_weights, tmp_path / "a", {"x": W, "w": W}, kind=CheckpointError)
    assert f"  x: x is not read: {weights.unread['x']}" in wanted
    text = refusal(weights.read, "x", ((0, 2), (0, 3)), torch.empty(2, 3), kind=CheckpointError)
    assert "x: it is a torchao.Coded: save x.dequantize()" in text and "run code" not in text


def written_whole(coded):
    """DCP's writer of one item, which gets a tensor of another class for the leaf `x`."""
    plain = torch_dcp.filesystem._write_item

    def write(transforms, stream, data, item, key, *rest):
        return plain(transforms, stream, coded if item.index.fqn == "x" else data, item, key, *rest)

    return write


def test_tensors_inside_tuples_are_read_and_other_values_listed(tmp_path):
    state = {"pair": (W, [W + 1, {"a": W.mT}]), "betas": (0.9, 0.95), "sparse": (W.to_sparse(),), "w": W, "step": 3}
    weights = fs.foreign.open_weights(save(state, tmp_path / "a"))
    assert {*weights.leaves} == {"w", "pair.0", "pair.1.0", "pair.1.1.a"}
    assert weights.others == ("betas", "step") and [*weights.unread] == ["sparse.0"]
    for name, want in {"w": W, "pair.0": W, "pair.1.0": W + 1, "pair.1.1.a": W.mT}.items():
        assert torch.equal(loaded(weights, name), want)
    found = fs.foreign.load_weights(tmp_path / "a", {"a": torch.empty(3, 2)}, {"a": "pair.1.1.a"}, extra="ignore")
    assert torch.equal(found["a"], W.mT)


class State(NamedTuple):
    """What optax calls a state."""

    count: torch.Tensor
    mu: torch.Tensor


def test_named_tuples_of_tensors_are_named_with_a_way_round(tmp_path):
    state = {"opt": State(torch.tensor(3), W), "w": W, "shape": Sizes(2, 3)}
    weights = fs.foreign.open_weights(save(state, tmp_path / "a"))
    assert [*weights.leaves] == ["w"] and weights.others == ("shape",) and [*weights.unread] == ["opt"]
    assert f"it names {State.__module__}.State, which" in weights.unread["opt"]
    assert weights.unread["opt"].endswith("save a dict, such as x._asdict() of a NamedTuple")
    again = fs.foreign.open_weights(save({**state, "opt": state["opt"]._asdict()}, tmp_path / "b"))
    assert torch.equal(loaded(again, "opt.mu"), W)


class Sizes(NamedTuple):
    """No tensors."""

    rows: int
    columns: int


def test_chunks_in_safetensors_files_are_read(tmp_path):
    folder = save(
        {"w": W, "b": torch.tensor(2.5)}, tmp_path / "a", serialization_format=SerializationFormat.SAFETENSORS
    )
    weights = fs.foreign.open_weights(folder)
    assert torch.equal(loaded(weights, "w", box=((1, 2), (0, 2))), W[1:, :2])
    assert loaded(weights, "b").item() == 2.5


def write_shards(folder):
    """Each of two ranks writes its rows, 3 and 2, a replica and a number."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Shard(1)])
    state = {"rows": rows, "columns": columns, "b": distribute_tensor(torch.ones(3), mesh, [Replicate()])}
    torch_dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))


def test_shards_of_hugging_face_storage_writer_are_joined(tmp_path):
    run_ranks(write_shards, 2, str(tmp_path), timeout=60.0)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2)]
    weights = fs.foreign.open_weights(tmp_path)
    assert weights.leaves["rows"].shape == (5, 3) and weights.leaves["columns"].shape == (2, 4)
    assert torch.equal(loaded(weights, "rows", box=((2, 4), (1, 3))), torch.arange(15.0).view(5, 3)[2:4, 1:3])
    like = {"rows": torch.empty(5, 3), "columns": torch.empty(2, 4), "b": torch.empty(3)}
    found = fs.foreign.load_weights(tmp_path, like)
    assert torch.equal(found["rows"], torch.arange(15.0).view(5, 3)) and found["b"].tolist() == [1.0] * 3
    assert torch.equal(found["columns"], torch.arange(8.0).view(2, 4))
    layout = fs.plan_layout(like, fs.make_mesh(device="cpu"))
    text = refusal(hf.load, tmp_path, layout, {"rows": "rows"}, kind=CheckpointError)
    assert "shards of torch's HuggingFaceStorageWriter, which fs.foreign.load_weights reads" in text
    files[0].unlink()
    text = refusal(fs.foreign.open_weights, tmp_path, kind=CheckpointError)
    assert "rows: its parts have 6 of 15 elements" in text and "Get all shards of one save, from every rank." in text
