"""Canaries: one for each private or version-dependent torch API that we touch. A failure here means torch has changed."""

import gc
import io
import pickle
import zipfile
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate

import fsharding as fs
from fsharding import ops
from fsharding.base import _compat, _functorch
from fsharding.base.errors import LayoutError
from fsharding.ops import scaled_mm
from fsharding.ops.grouped_matmul import _has_kernel, _takes_kernel
from fsharding.testing import assert_bitwise_equal, assert_trees_close
from tests.helpers import cpu_multiplies_codes


def test_views_share_a_storage_id_and_other_tensors_have_others():
    x = torch.zeros(4, 4)
    assert _compat.storage_id(x) == _compat.storage_id(x[1:].t()) == _compat.storage_id(x.detach())
    assert _compat.storage_id(x) != _compat.storage_id(x.clone())
    with FakeTensorMode():
        a, b = torch.zeros(4), torch.zeros(4)
        assert _compat.storage_id(a) == _compat.storage_id(a[1:]) != _compat.storage_id(b)


def test_a_fake_group_is_one_rank_of_many_and_sends_nothing():
    _compat.start_fake_group(3, 500)
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (3, 500, "fake")
        rows = torch.zeros(500, 2)
        _compat.all_gather_single(rows.view(-1), torch.ones(2))
        assert rows[3].tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


def test_the_same_view_is_one_of_the_same_elements_also_of_fake_tensors():
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            x = torch.zeros(4, 4)
            assert _compat.is_same_view(x[1], x[1:2].view(4))
            assert not any(_compat.is_same_view(x[1], y) for y in (x[2], x[1, :3], x[:, 1], torch.zeros(4)))


def test_a_change_in_place_shows_in_the_version():
    x = torch.zeros(4)
    before = _compat.version_of(x)
    assert _compat.version_of(x + 1) == before
    x[1:].add_(1)
    assert _compat.version_of(x) == before + 1


def test_a_dtensor_and_its_local_tensor_count_changes_apart():
    placed = DTensor.from_local(torch.zeros(4), fs.make_mesh(dp=1), [Replicate()], run_check=False)
    counted = [_compat.versions_of([placed])[0]]
    with torch.no_grad():
        for change in (lambda: placed.add_(1), lambda: placed.to_local().add_(1), lambda: placed.detach().add_(1)):
            change()
            counted.append(_compat.versions_of([placed])[0])
    assert len(set(counted)) == 4


def test_a_tensor_whose_backward_is_refused_is_written_as_any_other():
    def refuse(*_, **__):
        raise TypeError("no")

    x = _compat.refuse_backward(torch.ones(()), refuse)
    with pytest.raises(TypeError, match="no"):
        x.backward(retain_graph=True)
    written = io.BytesIO()
    torch.save({"x": x}, written)
    written.seek(0)
    for other in (pickle.loads(pickle.dumps(x)), torch.load(written)["x"], x.clone(), x + 0):
        assert vars(other) == {} and float(other) == 1
    assert len(pickle.dumps(x)) == len(pickle.dumps(torch.ones(())))


def test_a_backward_says_which_nodes_it_goes_through():
    seen = {}

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return x * 2 + w

        @staticmethod
        def backward(ctx, *grads):
            seen.update(zip("xw", (_compat.is_wanted(node) for node, _ in ctx.next_functions), strict=True))
            return grads[0] * 2, grads[0]

    x, w = (torch.ones(2, requires_grad=True) for _ in range(2))
    result: Any = Node.apply(x * 1, w * 1)
    for asked in ([x], [w], [x, w]):
        torch.autograd.grad(result.sum(), asked, retain_graph=True)
        assert seen == {"x": x in set(asked), "w": w in set(asked)}
    result.sum().backward()
    assert seen == {"x": True, "w": True}


def test_a_node_that_is_visited_first_comes_before_those_behind_it():
    order = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.view_as(x)

        @staticmethod
        def backward(ctx, *grads):
            order.append(ctx.name)
            return grads[0], None

    def visited(first):
        order.clear()
        x, w = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
        weight: Any = Node.apply(w, "weight")
        if first:
            _compat.visit_first(weight.grad_fn)
        hidden: Any = Node.apply(x, "layer")
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad((hidden @ weight).sum(), [x, w])
        return list(order)

    assert (visited(True), visited(False)) == (["weight", "layer"], ["layer", "weight"])


def test_storage_users_counts_who_holds_it():
    base = torch.empty(8)
    identity = _compat.storage_id(base)
    idle = _compat.storage_users(identity)
    view = base[2:]
    assert _compat.storage_users(identity) == idle + 1
    other = view.view(2, 3)
    assert _compat.storage_users(identity) == idle + 2
    del view, other
    gc.collect()
    assert _compat.storage_users(identity) == idle


def test_a_view_that_autograd_saved_counts_as_a_user():
    base, x = torch.ones(4), torch.ones(4, requires_grad=True)
    idle = _compat.storage_users(_compat.storage_id(base))
    out = (x * base[:]).sum()
    assert _compat.storage_users(_compat.storage_id(base)) == idle + 1
    out.backward()
    assert _compat.storage_users(_compat.storage_id(base)) == idle


class Pieces:
    """A file that only takes what is written."""

    def __init__(self):
        self.data = bytearray()

    def write(self, data):
        self.data += data
        return len(data)


def test_a_record_is_what_torch_saves_but_for_the_sums():
    x = torch.arange(6.0).reshape(2, 3)
    ours, theirs = Pieces(), io.BytesIO()
    _compat.save_record(x, ours)
    torch.save(x, theirs)
    assert len(ours.data) == len(theirs.getvalue())
    assert torch.equal(torch.load(io.BytesIO(ours.data)), x)
    with zipfile.ZipFile(io.BytesIO(ours.data)) as archive:
        assert [info.CRC for info in archive.infolist()] == [0] * len(archive.infolist())


def test_functorch_is_noticed():
    seen = []

    def f(x):
        seen.append(_functorch.in_functorch())
        return x.sum()

    f(torch.ones(2))
    torch.func.grad(f)(torch.ones(2))
    torch.func.vmap(f)(torch.ones(2, 2))
    torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),))
    assert seen == [False, True, True, True] and not _functorch.in_functorch()


def test_a_mesh_needs_no_process_group():
    mesh = _compat.meshless_device_mesh("cpu", ("dp",), torch.zeros(1, dtype=torch.int64), 0)
    assert mesh.get_coordinate() in ([0], (0,)) and mesh.mesh_dim_names == ("dp",) and not dist.is_initialized()
    x = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    assert_bitwise_equal(_compat.local_tensor(x), torch.ones(2))
    assert _compat.local_tensor(x).data_ptr() == x.to_local().data_ptr()


def test_a_copy_of_a_mesh_equals_it_and_alone_refuses_full_tensor():
    mesh = _compat.meshless_device_mesh("cpu", ("dp",), torch.zeros(1, dtype=torch.int64), 0)
    _compat.kept_by(mesh)["of"] = mesh
    copied = _compat.copy_of_mesh(mesh)
    assert copied == mesh and copied is not mesh and "of" not in _compat.kept_by(copied)

    def refuse(x):
        raise KeyError(tuple(x.shape))

    _compat.refuse_full_tensor(copied, refuse)
    x, y = (DTensor.from_local(torch.ones(2), where, [Replicate()], run_check=False) for where in (mesh, copied))
    assert_bitwise_equal(x.full_tensor(grad_placements=[Replicate()]), torch.ones(2))
    with pytest.raises(KeyError):
        (y + y).full_tensor()


def test_the_fused_kernel_takes_what_we_give_it():
    param, grad = torch.zeros(64), torch.linspace(-1, 1, 64)
    mu, nu, step = torch.zeros(64), torch.zeros(64), torch.tensor(1.0)
    _compat.fused_adamw_([param], [grad], [mu], [nu], [step], lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
    torch.testing.assert_close(mu, 0.1 * grad)
    torch.testing.assert_close(nu, 0.01 * grad * grad)
    torch.testing.assert_close(param, -0.1 * grad / (grad.abs() + 1e-8))
    assert step == 1, "the kernel reads the step and leaves it"


def test_foreach_functions_act_on_lists():
    a, b = [torch.ones(2), torch.ones(3)], [torch.full((2,), 2.0), torch.full((3,), 3.0)]
    assert_bitwise_equal(list(_compat.foreach_add(a, b)), [torch.full((2,), 3.0), torch.full((3,), 4.0)])
    assert_bitwise_equal(list(_compat.foreach_mul(a, 2.0)), [torch.full((2,), 2.0), torch.full((3,), 2.0)])
    _compat.foreach_mul_(a, 5.0)
    _compat.foreach_add_(a, b)
    assert_bitwise_equal(a, [torch.full((2,), 7.0), torch.full((3,), 8.0)])
    halves = [torch.zeros(2, dtype=torch.bfloat16)]
    _compat.foreach_copy_(halves, b[:1])
    assert_bitwise_equal(halves, [torch.full((2,), 2.0, dtype=torch.bfloat16)])
    norms = _compat.foreach_norm([*a, halves[0], torch.zeros(0)])
    assert_trees_close(norms, [torch.tensor(x).double().sqrt() for x in (98, 192, 8, 0)], rtol=1e-15)
    _compat.foreach_zero_(b)
    assert_bitwise_equal(b, [torch.zeros(2), torch.zeros(3)])


def test_tensors_are_loaded_as_shapes_that_know_their_place_in_the_file(tmp_path):
    torch.save({"a": torch.arange(3.0), "b": torch.arange(4)}, tmp_path / "x")
    with (tmp_path / "x").open("rb") as stream, _compat.shapes_only():
        found = torch.load(stream, map_location="cpu", weights_only=True)
    data = (tmp_path / "x").read_bytes()
    for name, want in (("a", torch.arange(3.0)), ("b", torch.arange(4))):
        at = _compat.file_offset(found[name])
        assert torch.equal(torch.frombuffer(bytearray(data[at : at + want.nbytes]), dtype=want.dtype), want)


def test_room_is_left_for_data(tmp_path):
    with _compat.shapes_only():
        state = {"a": torch.empty(3), "b": torch.empty(1 << 24)}
    _compat.save_without_data(state, tmp_path / "x")
    status = (tmp_path / "x").stat()
    assert status.st_size > 1 << 26 and status.st_blocks * 512 < 1 << 20
    assert not torch.load(tmp_path / "x", weights_only=True)["a"].any()


def test_grouped_products_and_where_they_are_to_be_had():
    x, w, offsets = torch.rand(5, 4), torch.rand(3, 4, 8), torch.tensor([2, 2, 5], dtype=torch.int32)
    want = torch.cat([x[:2] @ w[0], x[2:] @ w[2]])
    assert _takes_kernel(x, w) and _takes_kernel(x, w.mT.contiguous().mT)
    torch.testing.assert_close(F.grouped_mm(x, w, offs=offsets), want)
    sums = F.grouped_mm(x.mT, want, offs=offsets)
    torch.testing.assert_close(sums, torch.stack([x[:2].T @ want[:2], torch.zeros(4, 8), x[2:].T @ want[2:]]))
    assert _takes_kernel(x[:, :3], w[:, :3]), "strides count, not sizes"
    torch.testing.assert_close(F.grouped_mm(x[:, :3], w[:, :3], offs=offsets)[:2], x[:2, :3] @ w[0, :3])
    narrow = (torch.rand(5, 1), torch.rand(3, 1, 8)), (torch.rand(5, 8), torch.rand(3, 8, 1))
    for a, b in ((x.double(), w.double()), (torch.rand(5, 3), torch.rand(3, 3, 8)), (x[:0], w), *narrow):
        assert not _takes_kernel(a, b)


def test_asking_for_a_grouped_kernel_is_no_product_of_a_recomputed_function():
    """The kernel is tried out once in a process: within a selective checkpoint that would be taken for a result."""
    x, w, counts = torch.rand(5, 4, requires_grad=True), torch.rand(3, 4, 8), torch.tensor([2, 0, 3])

    def loss(x):
        return ops.grouped_matmul(x, w, counts).square().sum()

    (want,) = torch.autograd.grad(loss(x), x)
    _has_kernel.cache_clear()
    (found,) = torch.autograd.grad(fs.remat(loss, policy=fs.policies.dots_saveable)(x), x)
    assert torch.equal(found, want)


def test_values_come_out_of_transforms_but_for_vmap():
    seen = []

    def look(x):
        value = _functorch.unwrapped(x)
        if value is not None:
            with _functorch.outside_transforms():
                seen.append((value + 1).tolist())
        else:
            seen.append(None)
        return x.sum()

    torch.func.grad(lambda x: torch.func.grad(look)(x).sum() + x.sum())(torch.tensor([1.0, 2.0]))
    torch.func.jvp(look, (torch.tensor([3.0]),), (torch.tensor([1.0]),))
    torch.vmap(look)(torch.zeros(2, 1))
    assert seen == [[2.0, 3.0], [4.0], None]


def test_torch_orders_a_pipeline_from_the_numbers_of_its_stages():
    assert _compat.torch_pipeline_order("ScheduleInterleaved1F1B", 1, 2, 1) == [
        [("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0)]
    ]
    assert _compat.torch_pipeline_order("ScheduleInterleavedZeroBubble", 2, 2, 2)[1][:5] == [
        ("F", 1, 0),
        ("F", 1, 1),
        ("F", 3, 0),
        ("I", 3, 0),
        ("F", 3, 1),
    ]
    assert _compat.torch_pipeline_order("ScheduleZBVZeroBubble", 1, 2, 1) == [
        [("F", 0, 0), ("F", 1, 0), ("I", 1, 0), ("W", 1, 0), ("I", 0, 0), ("W", 0, 0)]
    ]
    row = _compat.torch_pipeline_order("ScheduleDualPipeV", 2, 2, 4)[0]
    assert row[7:11] == [("F", 0, 3), ("B", 3, 1), ("F", 3, 2), ("B", 0, 0)], (
        "an F and B that torch overlaps are in order"
    )
    assert not dist.is_initialized()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_to_two_blocks_can_be_put_together(dtype):
    """The kernels give and take the log-sum-exp, take grouped heads, and a finite mask that hides all of a row."""
    torch.manual_seed(0)
    near = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}[dtype]
    q, grad = torch.randn(2, 4, 6, 8, dtype=dtype), torch.randn(2, 4, 6, 8, dtype=dtype)
    k, v = torch.randn(2, 2, 2, 10, 8, dtype=dtype)
    mask = torch.zeros(2, 1, 6, 10, dtype=dtype)
    mask[:, :, 2, :5] = torch.finfo(dtype).min / 2
    halves = slice(0, 5), slice(5, 10)
    blocks = [_compat.KeyBlock(k[:, :, h], v[:, :, h], mask[..., h], False, 0.4) for h in halves]
    parts = [_compat.attend_block(q, block) for block in blocks]
    assert parts[0][1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert parts[0][1].shape == (2, 4, 6) and (parts[0][1][:, :, 2] < -1e30).all()
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(x * (part - lse).exp()[..., None] for x, part in parts)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    many = [x.repeat_interleave(2, 1) for x in leaves[1:]]
    want = torch.nn.functional.scaled_dot_product_attention(leaves[0], *many, attn_mask=mask.double(), scale=0.4)
    torch.testing.assert_close(out.double(), want.detach(), rtol=near, atol=near)
    grads = [_compat.attend_block_backward(grad, q, block, out.to(dtype), lse) for block in blocks]
    found = grads[0][0] + grads[1][0], *(torch.cat([g[i] for g in grads], 2) for i in (1, 2))
    for x, y in zip(found, torch.autograd.grad(want, leaves, grad.double()), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=near, atol=near)


def test_a_square_block_is_causal_and_all_that_the_kernels_take_may_be_views():
    q, k, v = torch.randn(3, 2, 7, 4, 8).transpose(2, 3).unbind(0)
    out, lse = _compat.attend_block(q, _compat.KeyBlock(k, v, None, causal=True, scale=None))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, want)
    assert lse.shape == (2, 4, 7)
    views = [x[:, :, 2:] for x in (torch.randn_like(q), q, k, v, out, lse)]
    copies = [x.contiguous() for x in views]
    both = [
        _compat.attend_block_backward(grad, q, _compat.KeyBlock(k, v, None, causal=False, scale=None), out, lse)
        for grad, q, k, v, out, lse in (views, copies)
    ]
    assert_bitwise_equal(list(both[0]), list(both[1]))


def test_the_kernels_of_other_devices_take_what_we_give_them():
    """On tensors without data: names, arguments and shapes. What they compute only a device can show."""
    q, k = torch.empty(2, 4, 6, 8, device="meta"), torch.empty(2, 2, 10, 8, device="meta")
    mask = torch.empty(2, 1, 6, 10, device="meta")
    out, lse = _compat.attend_block(q, _compat.KeyBlock(k, k, mask, causal=False, scale=None))
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 6), torch.float32)
    for given in (mask, None):
        block = _compat.KeyBlock(k, k, given, causal=False, scale=None)
        grads = _compat.attend_block_backward(q, q, block, out, lse)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


def test_what_torch_computes_element_by_element():
    f = torch.nn.functional
    yes = [torch.tanh, f.relu, f.gelu, torch.add, torch.mul, torch.pow, torch.clamp, torch.maximum, torch.clone]
    no = [torch.sum, torch.max, torch.softmax, torch.sort, torch.cumsum, torch.matmul, torch.Tensor.add_]
    seeded = [torch.bernoulli, f.dropout, torch.rand_like]
    assert all(map(_compat.is_elementwise, yes))
    assert not any(map(_compat.is_elementwise, [*no, *seeded]))


# ------------------------------------------------------------------------------- kernels that take sizes as they come
PAIRS = {
    "foreach_copy_": _compat.foreach_copy_,
    "foreach_add_": _compat.foreach_add_,
    "foreach_add": _compat.foreach_add,
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_other_sizes_are_refused_before_anything_changes(name):
    a, b = torch.zeros(4), torch.zeros(4, 3)
    for other in (torch.ones(3), torch.ones(()), torch.ones(4, 4)):
        with pytest.raises(LayoutError) as caught:
            PAIRS[name]([a, b], [torch.ones(4), other])
        assert str(caught.value) == (
            "fsharding got tensors that do not match.\n"
            f"  number 1: float32[4, 3] on cpu, float32{list(other.shape)} on cpu\n"
            "Pass contiguous tensors of one size, dtype and device."
        )
    with pytest.raises(LayoutError) as caught:
        PAIRS[name]([a, b], [torch.ones(4)])
    assert str(caught.value) == "fsharding got lists of 2, 1 tensors.\nPass lists of equal length."
    with pytest.raises(LayoutError) as caught:
        PAIRS[name]([a] * 99, [torch.ones(1)] * 99)
    assert str(caught.value).split("\n")[11:-1] == ["  and 89 more"]
    assert not a.any() and not b.any()


ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0}
WRONG = {
    "short gradient": (1, lambda: torch.ones(64)),
    "short moment": (3, lambda: torch.ones(64)),
    "narrow moment": (2, lambda: torch.ones(128, dtype=torch.bfloat16)),
    "gaps": (0, lambda: torch.ones(256)[::2]),
    "one element": (1, lambda: torch.ones(1).expand(128)),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_kernel_of_adamw_gets_tensors_that_belong_together(name):
    place, make = WRONG[name]
    columns = [[torch.ones(128), torch.ones(64)] for _ in range(4)]
    columns[place][0] = make()
    before = [[x.clone() for x in column] for column in columns]
    with pytest.raises(LayoutError) as caught:
        _compat.fused_adamw_(*columns, [torch.tensor(1.0)] * 2, **ADAM)
    head, row, _ = str(caught.value).split("\n")
    assert head == "fsharding got tensors that do not match." and row.startswith("  number 0: ")
    assert_bitwise_equal(columns, before)
    columns[place] = columns[place][:1]
    with pytest.raises(LayoutError, match="got lists of "):
        _compat.fused_adamw_(*columns, [torch.tensor(1.0)] * 2, **ADAM)


def test_packing_is_of_one_dtype_and_unpacking_of_enough():
    xs = [torch.ones(2), torch.ones(3).double()]
    with pytest.raises(LayoutError) as caught:
        _compat.packed(xs)
    assert str(caught.value) == (
        "fsharding got tensors that do not match.\n  number 1: float32[2] on cpu, float64[3] on cpu\n"
        "Pass contiguous tensors of one size, dtype and device."
    )
    with pytest.raises(LayoutError) as caught:
        _compat.unpack(torch.ones(4), xs)
    assert str(caught.value) == "fsharding got 4 elements for tensors of 5.\nPass at least 5 elements."
    assert [x.tolist() for x in _compat.unpack(torch.arange(6), xs)] == [[0, 1], [2, 3, 4]]


def test_torch_keeps_a_record_of_collectives_or_says_that_it_has_none(monkeypatch):
    names = [
        name for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json") if hasattr(torch._C._distributed_c10d, name)
    ]
    record = _compat.flight_record()
    assert record is None or '"entries"' in record
    for name in names:
        monkeypatch.setattr(
            torch._C._distributed_c10d, name, lambda **asked: f'{{"entries": ["{sorted(asked)}"]}}'.encode()
        )
    assert not names or _compat.flight_record() == "{\"entries\": [\"['includeCollectives', 'onlyActive']\"]}"


def test_the_compiler_leaves_frames_alone():
    seen = []

    @_compat.outside_of_graphs
    def outside(x):
        seen.append(("outside", _compat.is_compiled_caller()))
        return inside(x)

    @_compat.never_inlined
    def apart(x):
        seen.append(("apart", _compat.is_compiled_caller()))
        return inside(x)

    def inside(x):
        return x.sin()

    torch.compiler.reset()
    for fn, compiled in ((outside, False), (apart, True)):
        graphs = CompileCounter()
        seen.clear()
        assert float(torch.compile(lambda x, fn=fn: fn(x + 1) * 2, backend=graphs)(torch.zeros(()))) > 1.6
        assert seen == [(fn.__name__, compiled)]
        # One before the call and one after; `inside` is a third where the compiler sees what is called.
        assert graphs.frame_count == (3 if compiled else 2)
    assert not _compat.is_compiled_caller()


# ------------------------------------------------------------------------------------------------------- low precision
@cpu_multiplies_codes
def test_scaled_products_take_scales_of_rows():
    a, b = (torch.randn(n, 32).to(torch.float8_e4m3fn) for n in (5, 7))
    scales = torch.rand(5, 1), torch.rand(1, 7)
    want = (a.float() * scales[0]) @ (b.float() * scales[1].t()).t()
    rows = F.ScalingType.RowWise
    got = F.scaled_mm(a, b.t(), scales[0], rows, scales[1], rows, output_dtype=torch.float32)
    torch.testing.assert_close(got, want)


@cpu_multiplies_codes
def test_names_of_recipes_and_swizzles_are_those_of_torch():
    recipes = {"RowWise", "TensorWise", *(f"BlockWise{x}" for x in ("1x16", "1x32", "1x128", "128x128"))}
    assert recipes <= {*F.ScalingType.__members__}
    assert {"SWIZZLE_32_4_4", "NO_SWIZZLE"} <= {*F.SwizzleType.__members__}
    a, one = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.ones(())
    got = scaled_mm._product(a, a.t(), ([one], [one]), (["TensorWise"], ["TensorWise"]), None, torch.bfloat16)
    torch.testing.assert_close(got, (a.float() @ a.float().t()).bfloat16())


def test_a_node_says_what_its_result_is():
    y = torch.zeros(2, 3, requires_grad=True).to(torch.float8_e5m2)
    assert y.grad_fn is not None and y.grad_fn.name() == "ToCopyBackward0"
    assert _compat.result_of(y.grad_fn) == (torch.float8_e5m2, (2, 3))


def test_outside_of_modes_nothing_is_fake():
    with FakeTensorMode():
        assert _compat.is_fake(torch.ones(1))
        with _compat.outside_of_modes():
            assert float(torch.ones(1)) == 1
