# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportDeprecated=false
"""Every private or version-dependent torch API that we touch, in one place; each has a canary test."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import mmap
import operator
import os
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.multiprocessing.reductions import StorageWeakRef as WeakStorage
from torch.utils._python_dispatch import _disable_current_modes

from fsharding.base import devices
from fsharding.base.errors import LayoutError, message

__all__ = [
    "KeyBlock", "all_gather_several", "all_gather_single", "attend_block", "attend_block_backward", "cache_on_its_mesh",
    "cache_on_mesh", "call_first_at_exit", "clone", "close_group", "copied", "copy_of_mesh", "describe_mesh",
    "device_mesh_of", "drop_local", "enclose_full_tensor", "fake_mode", "fake_tensors", "fake_world", "file_offset",
    "flight_record", "foreach_add", "foreach_add_", "foreach_copy_", "foreach_mul", "foreach_mul_", "foreach_norm",
    "foreach_zero_", "fresh", "fused_adamw_", "glance", "group_timeout", "holders_of", "is_compiled_caller",
    "is_elementwise", "is_fake", "is_same_view", "is_wanted", "keep_unequal", "kept_by", "left_to_python",
    "like_dtensor", "local_tensor", "make_dtensor", "makes_fakes", "meshless_device_mesh", "never_inlined", "new_group",
    "outside_of_graphs", "outside_of_modes", "packed", "persistent_buffers", "reduce_scatter_single", "refuse_backward",
    "refuse_full_tensor", "region", "result_of", "same_glances", "same_kind", "save_record", "save_without_data",
    "shapes_only", "storage_id", "storage_users", "torch_pipeline_order", "unpack", "version_of", "versions_of",
    "visit_first", "weak_storage", "WeakStorage", "with_values",
]  # fmt: skip

_Function = TypeVar("_Function", bound=Callable[..., Any])


# -------------------------------------------------------------------------------------------------------- torch.compile
# The compiler is a callback that Python calls for each new frame while a compiled function runs. Each code object says
# for its own frame, and for all that are below it, whether the callback sees them. That is read by torch itself, so
# nothing is paid where nothing is compiled, and `torch._dynamo`, which takes seconds to import, is not needed.
_frames = torch._C._dynamo.eval_frame
_DEFAULT = _frames._FrameAction.DEFAULT
_SKIP = _frames._FrameAction.SKIP


def left_to_python(fn: _Function) -> _Function:
    """Has `torch.compile` leave the frame of a function alone, and look at those that it calls; others inline it."""
    _frames.set_code_exec_strategy(fn.__code__, _frames._FrameExecStrategy(_SKIP, _DEFAULT))
    return fn


def outside_of_graphs(fn: _Function) -> _Function:
    """Has `torch.compile` call a function, and all that it calls, as plain Python between two graphs."""
    # A function that is compiled by itself, such as a block, still is where this one calls it.
    _frames.set_code_exec_strategy(fn.__code__, _frames._FrameExecStrategy(_SKIP, _SKIP))
    vars(fn)["_torchdynamo_disable"] = True
    return fn


def never_inlined(fn: _Function) -> _Function:
    """As `left_to_python`, and no other function's graph has it inside either."""
    vars(fn)["_torchdynamo_disable"] = True
    return left_to_python(fn)


@left_to_python
def is_compiled_caller() -> bool:
    """Whether a function that is compiled has called this one, which is `never_inlined`."""
    return _frames.get_eval_frame_callback() is not None


# ----------------------------------------------------------------------------------------------- what a mesh keeps
# A cache keyed by meshes would keep them alive, also one with weak keys, as most results hold the mesh that they are
# of. So a mesh has its caches in itself, and is collected with them; an equal mesh has caches of its own. The compiler
# knows the attributes that torch gives a mesh, and from torch 2.15 on raises at any other: whatever reads the caches is
# `outside_of_graphs`.
_NAME = "_fsharding_kept"
"""The attribute of a mesh; read by this name where every call would pay for a look."""


class _Kept(dict[Hashable, Any]):
    """Caches that a mesh keeps. A copy of the mesh, such as one in a file, begins without any."""

    def __reduce__(self) -> Any:
        return OrderedDict, ()


@outside_of_graphs
def kept_by(mesh: DeviceMesh) -> dict[Hashable, Any]:
    """The cache of a mesh, by any keys; values may hold the mesh."""
    kept = vars(mesh).get(_NAME)
    if type(kept) is not _Kept:
        kept = vars(mesh)[_NAME] = _Kept()
    return kept


def makes_fakes() -> bool:
    """Whether tensors that are made here have no values, because `FakeTensorMode` is on."""
    return fake_mode() is not None


def fake_mode() -> Any:
    """Return the `FakeTensorMode` that is on; None outside of any."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def with_values() -> AbstractContextManager[Any]:
    """Makes tensors with values under `FakeTensorMode` as well, for what the host computes of keys and ranks."""
    return unset_fake_temporarily()


def clone(x: Tensor) -> Tensor:
    """A copy that has values if the tensor has, also under `FakeTensorMode`: a state's key has them there."""
    with nullcontext() if is_fake(x) else with_values():
        return x.clone()


def copied(x: Tensor) -> Tensor:
    """Copy a tensor; under `FakeTensorMode` the copy has no values, whether or not `x` has them."""
    if not makes_fakes() or is_fake(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _valued(fn: _Function) -> _Function:
    """A function of ranks, whose tensors have values also where the program's have none."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with with_values():
            return fn(*args)

    return run  # pyright: ignore[reportReturnType]


def cache_on_mesh(maxsize: int = 4096) -> Callable[[_Function], _Function]:
    """As `functools.lru_cache`, of a function whose first argument is a mesh: each `DeviceMesh` has a cache."""
    # No other argument has another `DeviceMesh`, or that would live as long. All are given by position.

    def decorate(fn: _Function) -> _Function:
        valued = _valued(fn)
        without = functools.lru_cache(maxsize)(valued)

        @outside_of_graphs
        @functools.wraps(fn)
        def run(mesh: Any, *args: Any) -> Any:
            try:
                cached = mesh._fsharding_kept[fn]
            except (AttributeError, KeyError):
                if not isinstance(mesh, DeviceMesh):
                    return without(mesh, *args)
                cached = kept_by(mesh)[fn] = functools.lru_cache(maxsize)(functools.partial(valued, mesh))
            return cached(*args)

        return run  # pyright: ignore[reportReturnType]

    return decorate


def cache_on_its_mesh(maxsize: int = 4096) -> Callable[[_Function], _Function]:
    """As `cache_on_mesh`, of a function whose first argument has a `mesh`."""

    def decorate(fn: _Function) -> _Function:
        valued = _valued(fn)
        without = functools.lru_cache(maxsize)(valued)

        @outside_of_graphs
        @functools.wraps(fn)
        def run(value: Any, *args: Any) -> Any:
            try:
                cached = value.mesh._fsharding_kept[fn]
            except (AttributeError, KeyError):
                if not isinstance(value.mesh, DeviceMesh):
                    return without(value, *args)
                cached = kept_by(value.mesh)[fn] = functools.lru_cache(maxsize)(valued)
            return cached(value, *args)

        return run  # pyright: ignore[reportReturnType]

    return decorate


# ------------------------------------------------------------------------------------------------------------- tensors
def foreach_add(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    """Adds the tensors of two lists pairwise; unlike torch's, takes empty lists, as do the others here."""
    _refuse_other_sizes(xs, ys)
    return list(torch._foreach_add(list(xs), list(ys))) if xs else []


def foreach_add_(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Adds the second list to the first in place."""
    _refuse_other_sizes(xs, ys)
    if xs:
        torch._foreach_add_(list(xs), list(ys))


def foreach_copy_(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Copies the second list into the first, casting as needed."""
    _refuse_other_sizes(xs, ys)
    if xs:
        torch._foreach_copy_(list(xs), list(ys))


def _refuse_other_sizes(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Sizes alone, which is a twentieth of what a copy costs; torch refuses other shapes of the same size by itself."""
    if [*map(Tensor.numel, xs)] != [*map(Tensor.numel, ys)]:
        raise LayoutError(_unlike((xs, ys)))


def _unlike(columns: Sequence[Sequence[Tensor]]) -> str:
    """Says which tensors of some lists do not belong together: the first ten of them, and how many more."""

    def kind(x: Tensor) -> str:
        where = f"{x.dtype}{list(x.shape)} on {x.device}".removeprefix("torch.")
        return where if x.is_contiguous() else f"{where} with gaps"

    if len({len(column) for column in columns}) > 1:
        return message(f"got lists of {', '.join(str(len(column)) for column in columns)} tensors.")
    named = [[kind(x) for x in leaf] for leaf in zip(*columns, strict=True)]
    rows = [f"number {i}: {', '.join(leaf)}" for i, leaf in enumerate(named) if len({*leaf}) > 1]
    return message("got tensors that do not belong together.", rows)


def foreach_mul(xs: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Multiplies the tensors of a list by a number; one that is a 0-d tensor is not read, and gives the same bits."""
    if not xs or not isinstance(factor, Tensor):
        return list(torch._foreach_mul(list(xs), factor)) if xs else []
    products = torch._foreach_mul(_with_dims(xs), _factor(xs, factor))
    return [y.view(x.shape) for x, y in zip(xs, products, strict=True)]


def foreach_mul_(xs: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies the tensors of a list by a number in place, as `foreach_mul`."""
    if xs and isinstance(factor, Tensor):
        torch._foreach_mul_(_with_dims(xs), _factor(xs, factor))
    elif xs:
        torch._foreach_mul_(list(xs), factor)


def _with_dims(xs: Sequence[Tensor]) -> list[Tensor]:
    """Views with at least one dim: the dtype of a 0-d tensor would give way to a wider 0-d factor's."""
    return [x if x.ndim else x.view(1) for x in xs]


def _factor(xs: Sequence[Tensor], factor: Tensor) -> Tensor:
    """The factor in float32 where all tensors are, which kernels for whole lists take."""
    factor = factor.to(xs[0].device, non_blocking=True)
    return factor.float() if all(x.dtype == torch.float32 for x in xs) else factor


def foreach_zero_(xs: Sequence[Tensor]) -> None:
    """Sets the tensors of a list to zero."""
    if xs:
        torch._foreach_zero_(list(xs))


def foreach_norm(xs: Sequence[Tensor]) -> list[Tensor]:
    """The root of the sum of squares of each tensor (float64, 0-d), which is taken in float64."""
    return list(torch._foreach_norm(list(xs), 2, dtype=torch.float64)) if xs else []


def local_tensor(x: DTensor) -> Tensor:
    """The local tensor of a DTensor itself, without the view and the graph node that `to_local` makes."""
    return x._local_tensor


def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]) -> DTensor:
    """A DTensor of a local tensor as it stands: `from_local` takes the shape `()` for none given, and is slower."""
    # Not DTensor(...): its empty __init__ is wrapped so that the first call imports torch._dynamo, a second or two.
    spec = _spec_of(mesh, tuple(placements), shape, local.dtype)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


@cache_on_mesh()
def _spec_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    meta = TensorMeta(torch.Size(shape), make_contiguous_strides_for(shape), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def like_dtensor(x: DTensor, local: Tensor) -> DTensor:
    """A DTensor of another local tensor, of the same dtype, in the place of one."""
    return DTensor.__new__(DTensor, local, x._spec, requires_grad=False)


_SPEC = operator.attrgetter("_spec")


def same_kind(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    """Whether tensors are pairwise DTensors of one spec, as those made here share one, or plain and alike."""
    if len(xs) != len(ys):
        return False
    if {*map(type, xs), *map(type, ys)} == {DTensor}:
        return all(map(operator.is_, map(_SPEC, xs), map(_SPEC, ys)))
    return all(
        isinstance(y, DTensor) and x._spec is y._spec
        if isinstance(x, DTensor)
        else not isinstance(y, DTensor) and x.shape == y.shape and x.dtype == y.dtype
        for x, y in zip(xs, ys, strict=True)
    )


def glance(x: Any) -> tuple[Any, ...]:
    """All of a leaf but its values: the spec of a DTensor, and the shape and dtype of its local tensor."""
    if isinstance(x, DTensor):
        local = x._local_tensor
        return x._spec, local.shape, local.dtype
    return (None, x.shape, x.dtype) if isinstance(x, Tensor) else (None, type(x), None)


def same_glances(now: Sequence[tuple[Any, ...]], before: Sequence[tuple[Any, ...]]) -> bool:
    """Whether glances are the same; DTensors that were made here share their specs, so identity will do."""
    same = (a[0] is b[0] and a[1] == b[1] and a[2] is b[2] for a, b in zip(now, before, strict=True))
    return len(now) == len(before) and all(same)


def packed(xs: Sequence[Tensor]) -> Tensor:
    """Tensors of one dtype one after the other, flat, in one call."""
    if len({x.dtype for x in xs}) > 1:
        raise LayoutError(_unlike([[xs[0]] * len(xs), xs]))
    return torch._utils._flatten_dense_tensors(tuple(xs))


def unpack(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of it, in the shapes of what it was packed from; it may be longer."""
    if flat.numel() < sum(map(Tensor.numel, like)):
        text = f"got {flat.numel()} elements for tensors of {sum(map(Tensor.numel, like))}."
        raise LayoutError(message(text))
    return torch._utils._unflatten_dense_tensors(flat, tuple(like))


def drop_local(x: DTensor) -> None:
    """Leaves a DTensor without its local tensor, whose memory is then free unless it is referenced elsewhere."""
    x._local_tensor = x._local_tensor.new_empty(0)


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized memory; on Linux, large CPU tensors ask for huge pages, which take far fewer page faults."""
    x = torch.empty(tuple(shape), dtype=dtype, device=device)
    if x.nbytes >= _HUGE and x.device.type == "cpu" and _madvise is not None and not is_fake(x):
        start = -(-x.data_ptr() // _PAGE) * _PAGE
        size = (x.data_ptr() + x.nbytes - start) // _PAGE * _PAGE
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return x


_PAGE = mmap.PAGESIZE
_HUGE = 4 << 20
_MADV_HUGEPAGE = 14
_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def wrapper_tensor(cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of a subclass on the CPU, without memory of its own: its `__torch_dispatch__` computes everything."""
    return Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that has a `__torch_dispatch__` alone."""


def map_large_allocations() -> None:
    """Have the C library give large memory of the CPU back when it is freed, for good; slower, and glibc's alone."""
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


_M_MMAP_THRESHOLD = -3


def storage_id(x: Tensor) -> int:
    """Identity of a tensor's storage: equal for all views of one buffer, also for fake tensors."""
    return x.untyped_storage()._cdata


def is_same_view(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same elements of one buffer, in one order."""
    if is_fake(x) or is_fake(y):  # torch would compare others in their place
        kinds = [(storage_id(z), z.storage_offset(), z.shape, z.stride()) for z in (x, y)]
        return kinds[0] == kinds[1]
    return x.is_set_to(y)


def persistent_buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers of a module, without its children's, that its state dict has."""
    own = module.named_buffers(recurse=False, remove_duplicate=False)
    return {name: buffer for name, buffer in own if name not in module._non_persistent_buffers_set}


def version_of(x: Tensor) -> int:
    """How often a tensor has been changed in place."""
    return x._version


_VERSIONS = operator.attrgetter("_version", "_local_tensor._version")


def versions_of(xs: Sequence[Tensor]) -> list[tuple[int, int]]:
    """How often DTensors and the local tensors in them were changed in place; the one does not count the other."""
    return list(map(_VERSIONS, xs))


def refuse_backward(x: Tensor, refuse: Callable[..., Any]) -> Tensor:
    """Has `.backward()` of one tensor call something else; copies and what is written to files are plain tensors."""
    vars(x).update(backward=refuse, __getstate__=_nothing)
    return x


def _nothing() -> None:
    """The state of a tensor of which nothing but the tensor is to be written."""


def weak_storage(x: Tensor) -> WeakStorage:
    """A weak reference to a tensor's storage, whose `expired()` is true when no view of it is left."""
    # As long as it lives, no other storage gets the `storage_id` of this one.
    return WeakStorage(x.untyped_storage())


def storage_users(storage_cdata: int) -> int:
    """How many tensors and Python objects hold a storage."""
    return torch._C._storage_Use_Count(storage_cdata)


def visit_first(node: Node) -> None:
    """Backward visits a node of its graph as soon as it can, as it does with those that add to `.grad`."""
    node._set_sequence_nr(1 << 62)


@functools.lru_cache(maxsize=1024)
def is_elementwise(fn: Callable[..., Any]) -> bool:
    """Whether torch says that a function computes each element from those at its place, into new memory."""
    name = getattr(fn, "__name__", "_")
    packet = None if name.endswith("_") else getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    # Of several functions of one name, such as max(x) and max(x, y), all have to be.
    taking = [x for x in overloads if _takes_tensor(x)]
    tags = [x.tags for x in taking]
    return bool(tags) and all(torch.Tag.pointwise in x and torch.Tag.nondeterministic_seeded not in x for x in tags)


def _takes_tensor(overload: Any) -> bool:
    """Whether an overload takes a tensor first, and gives a new one."""
    first = overload._schema.arguments[:1]
    return bool(first) and str(first[0].type) == "Tensor" and not overload._overloadname.endswith("out")


def is_wanted(node: Node) -> bool:
    """Whether the backward that is running goes through a node, which is no leaf of its graph."""
    return torch._C._will_engine_execute_node(node)


def result_of(node: Node, number: int = 0) -> tuple[torch.dtype, torch.Size]:
    """The dtype and the shape of a result of a node of autograd's graph."""
    result: Any = node._input_metadata[number]
    return result.dtype, torch.Size(result.shape)


def region(name: str) -> AbstractContextManager[Any]:
    """Names what is inside in the profiler's trace; free without a profiler."""
    return torch.profiler.record_function(f"fsharding: {name}") if torch.autograd._profiler_enabled() else _NOWHERE


_NOWHERE: AbstractContextManager[Any] = nullcontext()


def outside_of_modes() -> AbstractContextManager[Any]:
    """Under it no dispatch mode sees what is computed, such as a selective checkpoint or fake tensors."""
    return _disable_current_modes()


def shapes_only() -> AbstractContextManager[Any]:
    """Under it tensors are made, and `torch.load` loads them, without their data."""
    return FakeTensorMode()


def file_offset(x: Tensor) -> int:
    """Where in its file the storage of a tensor begins, which was loaded under `shapes_only`."""
    offset = x.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


def save_without_data(state: Any, file: Any) -> None:
    """`torch.save` of tensors made under `shapes_only`: leaves room in the file for their data, which is a hole."""
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, file)


def start_fake_group(rank: int, size: int) -> None:
    """Makes the default process group of one rank of many, without the others: its collectives send nothing."""
    # Their results have the right shapes and no meaning; torch's own fake backend copies what this rank gave.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # lazy: it registers the backend

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


_GROUP_STATE = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
    "_group_count",
    "_world",
    "_backend",
    "_default_pg_init_method",
)
_fake_groups = itertools.count(1 << 40, 1 << 20)
"""Numbers of groups of fake worlds: torch knows groups in C++ by their names, which are numbers."""


@contextmanager
def fake_world(rank: int, size: int) -> Generator[None]:
    """Be one rank of a fake world in this block, as in `start_fake_group`; hide other process groups."""
    before = {name: getattr(c10d, name) for name in _GROUP_STATE}
    hook, own = sys.excepthook, dist.get_rank() if dist.is_initialized() else -1
    try:
        for name in _GROUP_STATE[:6]:
            setattr(c10d, name, {})
        c10d._world = c10d._World()
        c10d._group_count = next(_fake_groups)
        start_fake_group(rank, size)
        yield
    finally:
        for name in c10d._pg_names.values() if c10d._pg_names is not before["_pg_names"] else ():
            torch._C._distributed_c10d._unregister_process_group(name)
        for name, value in before.items():
            setattr(c10d, name, value)
        torch._C._distributed_c10d._set_global_rank(own)
        sys.excepthook = hook


def fake_tensors() -> AbstractContextManager[Any]:
    """Make only tensors without values in this block; operations take tensors from before as well."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def keep_unequal(mesh: DeviceMesh) -> None:
    """Have a mesh of a fake world differ from every real one, whose name torch's caches would take for it."""
    mesh._thread_id = -1
    mesh._hash = None


def _known(owner: Any, name: str, before: str) -> str:
    """The name of a collective: torch renamed these in 2.13 and warns about the older names from then on."""
    return name if hasattr(owner, name) else before


_ALL_GATHER = _known(dist, "all_gather_single", "all_gather_into_tensor")
_REDUCE_SCATTER = _known(dist, "reduce_scatter_single", "reduce_scatter_tensor")
_ALL_GATHER_SEVERAL = _known(dist.ProcessGroup, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")


def all_gather_several(gathered: list[Tensor], own: list[Tensor], *, group: dist.ProcessGroup) -> dist.Work:
    """Starts to gather several tensors of all ranks of a group, each into one."""
    return getattr(group, _ALL_GATHER_SEVERAL)(gathered, own)


def all_gather_single(
    gathered: Tensor, own: Tensor, *, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Gathers equal tensors of all ranks of a group into one."""
    return getattr(dist, _ALL_GATHER)(gathered, own, group=group, async_op=async_op)


def reduce_scatter_single(
    own: Tensor, rows: Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Adds rows over the ranks of a group and keeps the row of this rank."""
    return getattr(dist, _REDUCE_SCATTER)(own, rows, group=group, async_op=async_op)


def new_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """A group of some ranks, with the backend of the default one; None on a rank outside. All ranks call it."""
    group = dist.new_group(list(ranks), timeout=timeout)
    return group if isinstance(group, dist.ProcessGroup) else None


def holders_of(group: dist.ProcessGroup) -> int:
    """How many Python objects and names hold a group, those of torch among them, and some more: compare two of them."""
    # torch has no other way to tell whether it is in use; C++ users hold it through Python.
    return sys.getrefcount(group)


def close_group(group: dist.ProcessGroup) -> None:
    """Ends a group: what was sent in it is done, and its threads and connections go with the last who holds it."""
    devices.synchronize()
    dist.destroy_process_group(group)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of a group's collectives, which all of its backends have."""
    host = torch.device("cpu")
    return group._get_backend(host if host in group._device_types else group._device_types[0]).options._timeout


def flight_record() -> str | None:
    """torch's record of the collectives of this process that are under way, as JSON; None where it keeps none."""
    module = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # the second for every backend, in newer torch
        dump: Any = getattr(module, name, None)
        text = "" if dump is None else dump(includeCollectives=True, onlyActive=True).decode(errors="replace")
        if '"entries"' in text:
            return text
    return None


def save_record(x: object, file: Any) -> None:
    """`torch.save(x, file)` without the CRC32, which costs as much as a sha256 and which torch never looks at."""
    # torch's own switch for it is one for the whole process, other threads included.
    writer = torch._C.PyTorchFileWriter(file, False, 64)
    torch.serialization._save(x, writer, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    writer.write_end_of_file()


def device_mesh_of(
    groups: Sequence[dist.ProcessGroup], device_type: str, names: tuple[str, ...], grid: Tensor
) -> DeviceMesh:
    """A DeviceMesh of process groups that there are already, one for each of its dims; they live as long as it does."""
    mesh = DeviceMesh.from_group(list(groups), device_type, mesh=grid, mesh_dim_names=names)
    kept_by(mesh)["groups"] = tuple(groups)  # torch itself knows their names, and in some versions no more
    return mesh


_TORCHS: dict[tuple[type[Any], str], Callable[..., Any]] = {}
"""Methods of torch's classes in whose places functions of ours stand, by class and name."""


def _replace(cls: type[Any], name: str, ours: Callable[..., Any]) -> None:
    if (cls, name) not in _TORCHS:
        _TORCHS[cls, name] = getattr(cls, name)
        setattr(cls, name, functools.update_wrapper(ours, _TORCHS[cls, name]))


def describe_mesh(mesh: DeviceMesh, describe: Callable[[], str]) -> None:
    """Has the `repr` of a mesh end with a text. Its class has to stay torch's own, which compilers look for."""
    _replace(DeviceMesh, "__repr__", _described_repr)
    kept_by(mesh)["describe"] = describe


def _described_repr(mesh: DeviceMesh) -> str:
    text = _TORCHS[DeviceMesh, "__repr__"](mesh)
    describe = kept_by(mesh).get("describe")
    return text if describe is None else f"{text.removesuffix(')')}, {describe()})"


def copy_of_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Another DeviceMesh of the same ranks and process groups, with caches of its own."""
    result = DeviceMesh.__new__(DeviceMesh)
    vars(result).update({name: value for name, value in vars(mesh).items() if name != _NAME})
    return result


def refuse_full_tensor(mesh: DeviceMesh, refuse: Callable[[DTensor], NoReturn]) -> None:
    """Has `full_tensor` of every DTensor on a mesh, also those that torch makes of others, call something else."""
    _replace(DTensor, "full_tensor", _full_tensor)
    kept_by(mesh)["full_tensor"] = refuse


def enclose_full_tensor(enclose: Callable[[DTensor], AbstractContextManager[Any]]) -> None:
    """Have `full_tensor` of every DTensor run inside a context manager that is made for it."""
    global _enclose
    _replace(DTensor, "full_tensor", _full_tensor)
    _enclose = enclose


_enclose: Callable[[DTensor], AbstractContextManager[Any]] = nullcontext


def _full_tensor(self: DTensor, **kwargs: Any) -> Tensor:
    refuse = kept_by(self.device_mesh).get("full_tensor")
    if refuse is not None:
        return refuse(self)
    plain = _TORCHS[DTensor, "full_tensor"]
    if torch.compiler.is_compiling():
        return plain(self, **kwargs)
    with _enclose(self):
        return plain(self, **kwargs)


def meshless_device_mesh(device_type: str, names: tuple[str, ...], grid: Tensor, rank: int) -> DeviceMesh:
    """A DeviceMesh without process groups, as seen by one of the ranks in its grid."""
    mesh = DeviceMesh(device_type, grid, mesh_dim_names=names, _init_backend=False, _rank=rank)
    mesh._dim_group_names = []
    return mesh


def torch_pipeline_order(name: str, ranks: int, local: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Return torch's order of a pipeline's computes: for each rank (F, B, I or W; stage; microbatch)."""
    # Its schedules take modules and process groups, but use numbers only. An F and a B that it would overlap come one
    # after the other.
    from torch.distributed.pipelining import schedules  # lazy: it imports torch._dynamo, a second or two

    kind: Any = getattr(schedules, name)
    numbers = {"num_stages": ranks * local, "group_size": ranks, "group_rank": 0, "submod": None}
    order = kind([SimpleNamespace(**numbers, stage_index=i * ranks) for i in range(local)], microbatches).pipeline_order
    numbers_of = operator.attrgetter("computation_type.value", "stage_index", "microbatch_index")
    return [
        [numbers_of(part) for action in order[rank] if action for part in action.sub_actions or (action,)]
        for rank in range(ranks)
    ]


def fused_adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    mu: list[Tensor],
    nu: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    scale: float | Tensor = 1.0,
    finite: Tensor | None = None,
    **settings: Any,
) -> None:
    """torch's fused AdamW kernel, with its own settings: updates params, mu, nu and, unless scale is 1, grads."""
    # On the CPU the kernel takes as many elements of each column as the parameter has, wherever these end. Rate and
    # scale as 0-d tensors are not read by the host. Where `finite`, bool and 0-d, is false, nothing is updated.
    columns = params, grads, mu, nu
    sizes = [*map(Tensor.numel, params)]
    if not all([*map(Tensor.numel, column)] == sizes and all(map(Tensor.is_contiguous, column)) for column in columns):
        raise LayoutError(_unlike(columns))
    device = params[0].device
    if isinstance(scale, Tensor):
        divisor = (1.0 / scale.double()).float()
    else:
        divisor = torch.tensor(1.0 / scale, device=device) if scale != 1.0 else None
    if isinstance(lr, Tensor):
        # The CPU's kernel takes a rate in float64, as a number; that of a device reads a float32. Torch has no kernel
        # for fake tensors with a rate in a tensor, and would run the real one.
        lr = 0.0 if is_fake(params[0]) else lr if device.type == "cpu" else lr.float()
    found_inf = None if finite is None else finite.logical_not().float()
    try:
        torch._fused_adamw_(
            params, grads, mu, nu, [], steps,
            lr=lr, **settings, amsgrad=False, maximize=False, grad_scale=divisor, found_inf=found_inf,
        )  # fmt: skip
    except RuntimeError as error:
        # Dtypes and devices are what the kernel looks at itself.
        raise LayoutError(_unlike(columns)) from error


class KeyBlock(NamedTuple):
    """A block of keys and values, and how queries attend to it."""

    k: Tensor
    v: Tensor
    mask: Tensor | None  # added to the scores
    causal: bool
    scale: float | None  # of the scores


def attend_block(q: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys: what comes out, and the log-sum-exp of its scores, float[B, H, T]."""
    # H is a multiple of the heads of k and v. A mask is added to the scores, has the dtype of q and is finite: where
    # all of a row is -inf, the CPU's kernel says that the log-sum-exp is 0. An empty q or k ends the process.
    k, v, mask, causal, scale = block
    kernel = block_kernel(q.device.type)
    if kernel == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    if kernel == "plain":
        scores, values = _scores(q, block), _for_each_head(v, q)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp().to(q.dtype) @ values, lse
    k, v = (_for_each_head(x, q) for x in (k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(mask, q, k), True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def attend_block_backward(
    grad: Tensor, q: Tensor, block: KeyBlock, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The terms that one block of keys adds to the gradients of q, and the gradients of k and v."""
    # `out` and `lse` are those of attention to all blocks; then exp(score - lse) is the weight of each key among all.
    k, v, mask, causal, scale = block
    kernel = block_kernel(q.device.type)
    if kernel == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
    keys, values = (_for_each_head(x, q) for x in (k, v))
    if kernel == "plain":
        weights = (_scores(q, block) - lse.unsqueeze(-1)).exp()
        terms = (grad @ values.mT).to(lse.dtype) - (grad * out).sum(-1, keepdim=True, dtype=lse.dtype)
        of_scores = (weights * terms * _scale(q, scale)).to(q.dtype)
        of_keys, of_values = of_scores.mT @ q, weights.to(q.dtype).mT @ grad
        return of_scores @ keys, _sum_of_heads(of_keys, k), _sum_of_heads(of_values, k)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32))
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, keys, values, _aligned(mask, q, k), out, lse, none, none, 0.0, [True, True, True, False], causal,
        scale=scale,
    )  # fmt: skip
    return dq, _sum_of_heads(dk, k), _sum_of_heads(dv, k)


@functools.cache
def block_kernel(device_type: str) -> Literal["cpu", "efficient", "plain"]:
    """The kernel of torch that gives log-sum-exps on a type of device; "plain" if it has none: matrix products."""
    if device_type == "cpu":
        return "cpu"
    name, key = "aten::_scaled_dot_product_efficient_attention", torch._C._dispatch_key_for_device(device_type)
    return "efficient" if torch._C._dispatch_has_kernel_for_dispatch_key(name, key) else "plain"


def _scores(q: Tensor, block: KeyBlock) -> Tensor:
    """The scores of a block in float32 at least: [B, H, T, S]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ _for_each_head(block.k, q).to(wide).mT * _scale(q, block.scale)
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores if block.mask is None else scores + block.mask


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _sum_of_heads(grad: Tensor, k: Tensor) -> Tensor:
    """Gradients for each query head, summed for each head of keys."""
    return grad.unflatten(1, (k.shape[1], -1)).sum(2)


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of grouped queries once for each query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] < q.shape[1] else x


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask for all heads whose rows begin where CUDA's kernel wants them."""
    if mask is None:
        return None
    size = k.shape[2]
    padded = torch.nn.functional.pad(mask, (0, -size % 16))[..., :size]
    return padded.expand(q.shape[0], q.shape[1], q.shape[2], size)


def call_first_at_exit(fn: Callable[[], bool]) -> None:
    """Calls a function at the end of the process, before all that `atexit` has; the status is 1 if it returns True."""
    # An exception of a function at the exit does not change the status. So this one runs the others, and ends the
    # process itself.

    def end() -> None:
        if fn():
            atexit.unregister(end)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    # Called before the functions of `atexit`, of which the last one registered is the first to be called.
    threading._register_atexit(lambda: atexit.register(end))


# --------------------------------------------------------------------------------------------------------- fake tensors
def is_fake(x: Tensor) -> bool:
    """Whether a tensor has no values, as under `FakeTensorMode`: it stands for one of a device that may not be here."""
    return isinstance(x, FakeTensor)
