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
# The compiler is a callback that Python calls for each new frame while a compiled function runs. A code object carries
# two actions, for its own frame and for all frames below. torch reads them in C++, so they cost nothing without
# compilation, and `torch._dynamo`, which takes seconds to import, isn't needed.
_frames = torch._C._dynamo.eval_frame
_DEFAULT = _frames._FrameAction.DEFAULT
_SKIP = _frames._FrameAction.SKIP


def left_to_python(fn: _Function) -> _Function:
    """Have `torch.compile` skip the frame of a function, but not its callees; compiled callers may inline it."""
    _frames.set_code_exec_strategy(fn.__code__, _frames._FrameExecStrategy(_SKIP, _DEFAULT))
    return fn


def outside_of_graphs(fn: _Function) -> _Function:
    """Have `torch.compile` run a function, and its callees, as plain Python between two graphs."""
    # A callee that is itself compiled, such as a block, still runs compiled.
    _frames.set_code_exec_strategy(fn.__code__, _frames._FrameExecStrategy(_SKIP, _SKIP))
    vars(fn)["_torchdynamo_disable"] = True
    return fn


def never_inlined(fn: _Function) -> _Function:
    """Like `left_to_python`, but compiled callers don't inline it either."""
    vars(fn)["_torchdynamo_disable"] = True
    return left_to_python(fn)


@left_to_python
def is_compiled_caller() -> bool:
    """Return whether a compiled function has called the current one, which is `never_inlined`."""
    return _frames.get_eval_frame_callback() is not None


# ----------------------------------------------------------------------------------------------- what a mesh keeps
# A cache keyed by meshes would keep them alive, even with weak keys, because most results reference their mesh. So each
# mesh stores its caches and is collected with them; equal meshes don't share caches. From torch 2.15 on, the compiler
# raises at attributes that torch doesn't define: whatever reads the caches is `outside_of_graphs`.
_NAME = "_fsharding_kept"  # hot paths write this name out


class _Kept(dict[Hashable, Any]):
    """Caches of a mesh. A copy of the mesh, such as a pickled one, starts without any."""

    def __reduce__(self) -> Any:
        return OrderedDict, ()


@outside_of_graphs
def kept_by(mesh: DeviceMesh) -> dict[Hashable, Any]:
    """Return the caches of a mesh; values may reference the mesh."""
    kept = vars(mesh).get(_NAME)
    if type(kept) is not _Kept:
        kept = vars(mesh)[_NAME] = _Kept()
    return kept


def makes_fakes() -> bool:
    """Return whether new tensors have no values, because `FakeTensorMode` is active."""
    return fake_mode() is not None


def fake_mode() -> Any:
    """Return the active `FakeTensorMode`, or None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def with_values() -> AbstractContextManager[Any]:
    """Make real tensors in this block even under `FakeTensorMode`, for keys and ranks that the host computes."""
    return unset_fake_temporarily()


def clone(x: Tensor) -> Tensor:
    """Copy a tensor with its values, even under `FakeTensorMode`, where the key of a state is real."""
    with nullcontext() if is_fake(x) else with_values():
        return x.clone()


def copied(x: Tensor) -> Tensor:
    """Copy a tensor; under `FakeTensorMode` the copy is fake even if `x` is real."""
    if not makes_fakes() or is_fake(x) or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _valued(fn: _Function) -> _Function:
    """Make a function of ranks compute with real tensors even under `FakeTensorMode`."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with with_values():
            return fn(*args)

    return run  # pyright: ignore[reportReturnType]


def cache_on_mesh(maxsize: int = 4096) -> Callable[[_Function], _Function]:
    """Cache a function whose first argument is a mesh, in the mesh; otherwise like `functools.lru_cache`."""
    # Arguments are positional. No other argument may reference a different `DeviceMesh`, which the cache would keep.

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


def cache_on_its_mesh(fn: _Function) -> _Function:
    """Cache a function whose first argument has a `mesh`, in that mesh."""
    # Not through `cache_on_mesh`: a step looks up hundreds of values.
    valued = _valued(fn)
    without = functools.lru_cache(4096)(valued)

    @outside_of_graphs
    @functools.wraps(fn)
    def run(value: Any, *args: Any) -> Any:
        try:
            cached = value.mesh._fsharding_kept[fn]
        except (AttributeError, KeyError):
            if not isinstance(value.mesh, DeviceMesh):
                return without(value, *args)
            cached = kept_by(value.mesh)[fn] = functools.lru_cache(4096)(valued)
        return cached(value, *args)

    return run  # pyright: ignore[reportReturnType]


# ------------------------------------------------------------------------------------------------------------- tensors
def foreach_add(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    """Add the tensors of two lists pairwise. Unlike torch's, these functions accept empty lists."""
    _refuse_other_sizes(xs, ys)
    return list(torch._foreach_add(list(xs), list(ys))) if xs else []


def foreach_add_(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Add the second list to the first in place."""
    _refuse_other_sizes(xs, ys)
    if xs:
        torch._foreach_add_(list(xs), list(ys))


def foreach_copy_(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Copy the second list into the first, casting as needed."""
    _refuse_other_sizes(xs, ys)
    if xs:
        torch._foreach_copy_(list(xs), list(ys))


def _refuse_other_sizes(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
    """Raise if lists differ in length or sizes."""
    # Sizes only, at a twentieth of the cost of a copy: torch itself raises for different shapes of equal size.
    if [*map(Tensor.numel, xs)] != [*map(Tensor.numel, ys)]:
        raise LayoutError(_unlike((xs, ys)))


def _unlike(columns: Sequence[Sequence[Tensor]]) -> str:
    """Word which tensors of some lists don't match."""

    def kind(x: Tensor) -> str:
        where = f"{x.dtype}{list(x.shape)} on {x.device}".removeprefix("torch.")
        return where if x.is_contiguous() else f"{where} with gaps"

    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(str(len(column)) for column in columns)
        return message(f"got lists of {lengths} tensors.", mend="Pass lists of equal length.")
    named = [[kind(x) for x in leaf] for leaf in zip(*columns, strict=True)]
    rows = [f"number {i}: {', '.join(leaf)}" for i, leaf in enumerate(named) if len({*leaf}) > 1]
    return message("got tensors that do not match.", rows, "Pass contiguous tensors of one size, dtype and device.")


def foreach_mul(xs: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Multiply the tensors of a list by a number, or by a 0-d tensor with the same result and without a host sync."""
    if not xs or not isinstance(factor, Tensor):
        return list(torch._foreach_mul(list(xs), factor)) if xs else []
    products = torch._foreach_mul(_with_dims(xs), _factor(xs, factor))
    return [y.view(x.shape) for x, y in zip(xs, products, strict=True)]


def foreach_mul_(xs: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply the tensors of a list by a number in place, like `foreach_mul`."""
    if xs and isinstance(factor, Tensor):
        torch._foreach_mul_(_with_dims(xs), _factor(xs, factor))
    elif xs:
        torch._foreach_mul_(list(xs), factor)


def _with_dims(xs: Sequence[Tensor]) -> list[Tensor]:
    """View 0-d tensors as 1-d: type promotion would give a 0-d tensor the dtype of a wider 0-d factor."""
    return [x if x.ndim else x.view(1) for x in xs]


def _factor(xs: Sequence[Tensor], factor: Tensor) -> Tensor:
    """Convert a factor to float32 if all tensors are, as fused list kernels require."""
    factor = factor.to(xs[0].device, non_blocking=True)
    return factor.float() if all(x.dtype == torch.float32 for x in xs) else factor


def foreach_zero_(xs: Sequence[Tensor]) -> None:
    """Set the tensors of a list to zero."""
    if xs:
        torch._foreach_zero_(list(xs))


def foreach_norm(xs: Sequence[Tensor]) -> list[Tensor]:
    """Compute the L2 norm of each tensor in float64 (0-d)."""
    return list(torch._foreach_norm(list(xs), 2, dtype=torch.float64)) if xs else []


def local_tensor(x: DTensor) -> Tensor:
    """Return the local tensor of a DTensor, without the view and graph node that `to_local` makes."""
    return x._local_tensor


def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]) -> DTensor:
    """Make a DTensor of a local tensor."""
    # Not `from_local`, which is slower and takes the shape `()` for a missing one. Not `DTensor(...)`, whose first call
    # imports `torch._dynamo` (by the wrapper of `__init__`), which takes a second or two.
    spec = _spec_of(mesh, tuple(placements), shape, local.dtype)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


@cache_on_mesh()
def _spec_of(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    meta = TensorMeta(torch.Size(shape), make_contiguous_strides_for(shape), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def like_dtensor(x: DTensor, local: Tensor) -> DTensor:
    """Make a DTensor like `x` with a different local tensor of the same dtype."""
    return DTensor.__new__(DTensor, local, x._spec, requires_grad=False)


_SPEC = operator.attrgetter("_spec")


def same_kind(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    """Return whether tensors are pairwise DTensors with the same spec object, or plain with equal shapes and dtypes."""
    if len(xs) == len(ys) and {*map(type, xs), *map(type, ys)} == {DTensor}:
        return all(map(operator.is_, map(_SPEC, xs), map(_SPEC, ys)))
    return same_glances([*map(glance, xs)], [*map(glance, ys)])


def glance(x: Any) -> tuple[Any, ...]:
    """Return everything about a leaf except its values: a DTensor's spec, and the local shape and dtype."""
    if isinstance(x, DTensor):
        local = x._local_tensor
        return x._spec, local.shape, local.dtype
    return (None, x.shape, x.dtype) if isinstance(x, Tensor) else (None, type(x), None)


def same_glances(now: Sequence[tuple[Any, ...]], before: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether glances are equal; `make_dtensor` caches specs, so identity suffices."""
    same = (a[0] is b[0] and a[1] == b[1] and a[2] is b[2] for a, b in zip(now, before, strict=True))
    return len(now) == len(before) and all(same)


def packed(xs: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype, flattened."""
    if len({x.dtype for x in xs}) > 1:
        raise LayoutError(_unlike([[xs[0]] * len(xs), xs]))
    return torch._utils._flatten_dense_tensors(tuple(xs))


def unpack(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split a packed tensor, which may be longer, into views shaped like `like`."""
    if flat.numel() < (needed := sum(map(Tensor.numel, like))):
        mend = f"Pass at least {needed} elements."
        raise LayoutError(message(f"got {flat.numel()} elements for tensors of {needed}.", mend=mend))
    return torch._utils._unflatten_dense_tensors(flat, tuple(like))


def drop_local(x: DTensor) -> None:
    """Replace the local tensor of a DTensor by an empty one, to free its memory."""
    x._local_tensor = x._local_tensor.new_empty(0)


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate an uninitialized tensor; on Linux, large CPU tensors use huge pages, with far fewer page faults."""
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
    """Make a CPU tensor of a subclass without memory, whose `__torch_dispatch__` computes everything."""
    return Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass that has only a `__torch_dispatch__`."""


def map_large_allocations() -> None:
    """Have glibc return freed large CPU allocations to the system, for the rest of the process; slower."""
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


_M_MMAP_THRESHOLD = -3


def storage_id(x: Tensor) -> int:
    """Return the identity of a tensor's storage: equal for all views of one buffer, also for fake tensors."""
    return x.untyped_storage()._cdata


def is_same_view(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are the same view of one buffer."""
    if is_fake(x) or is_fake(y):  # `is_set_to` would compare their meta tensors
        kinds = [(storage_id(z), z.storage_offset(), z.shape, z.stride()) for z in (x, y)]
        return kinds[0] == kinds[1]
    return x.is_set_to(y)


def persistent_buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a module, without its children's."""
    own = module.named_buffers(recurse=False, remove_duplicate=False)
    return {name: buffer for name, buffer in own if name not in module._non_persistent_buffers_set}


def version_of(x: Tensor) -> int:
    """Return how often a tensor was modified in place."""
    return x._version


_VERSIONS = operator.attrgetter("_version", "_local_tensor._version")


def versions_of(xs: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return how often DTensors, and separately their local tensors, were modified in place."""
    return list(map(_VERSIONS, xs))


def refuse_backward(x: Tensor, refuse: Callable[..., Any]) -> Tensor:
    """Replace `.backward()` of one tensor; copies and pickles of it are plain tensors."""
    vars(x).update(backward=refuse, __getstate__=_nothing)
    return x


def _nothing() -> None:
    """Return no attributes to pickle."""


def weak_storage(x: Tensor) -> WeakStorage:
    """Return a weak reference to a tensor's storage, whose `expired()` is true once no view is left."""
    # While the reference exists, no other storage gets this one's `storage_id`.
    return WeakStorage(x.untyped_storage())


def storage_users(storage_cdata: int) -> int:
    """Return the number of tensors and Python objects that reference a storage."""
    return torch._C._storage_Use_Count(storage_cdata)


def visit_first(node: Node) -> None:
    """Have backward visit a node as soon as it is ready, like the nodes that accumulate `.grad`."""
    node._set_sequence_nr(1 << 62)


@functools.lru_cache(maxsize=1024)
def is_elementwise(fn: Callable[..., Any]) -> bool:
    """Return whether torch tags a function as elementwise and it writes to new memory."""
    name = getattr(fn, "__name__", "_")
    packet = None if name.endswith("_") else getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    # All overloads have to be elementwise: max(x, y) is, max(x) isn't.
    taking = [x for x in overloads if _takes_tensor(x)]
    tags = [x.tags for x in taking]
    return bool(tags) and all(torch.Tag.pointwise in x and torch.Tag.nondeterministic_seeded not in x for x in tags)


def _takes_tensor(overload: Any) -> bool:
    """Return whether an overload takes a tensor first and returns a new one."""
    first = overload._schema.arguments[:1]
    return bool(first) and str(first[0].type) == "Tensor" and not overload._overloadname.endswith("out")


def is_wanted(node: Node) -> bool:
    """Return whether the running backward visits a node, which isn't a leaf of its graph."""
    return torch._C._will_engine_execute_node(node)


def result_of(node: Node, number: int = 0) -> tuple[torch.dtype, torch.Size]:
    """Return the dtype and shape of an output of an autograd node."""
    result: Any = node._input_metadata[number]
    return result.dtype, torch.Size(result.shape)


def region(name: str, of: str = "") -> AbstractContextManager[Any]:
    """Name this block in the profiler's trace, and for logs the unit that it is for; free without a profiler."""
    return torch.profiler.record_function(f"fsharding: {name}") if torch.autograd._profiler_enabled() else _NOWHERE


_NOWHERE: AbstractContextManager[Any] = nullcontext()


def outside_of_modes() -> AbstractContextManager[Any]:
    """Hide this block from dispatch modes, such as selective checkpointing and fake tensors."""
    return _disable_current_modes()


def shapes_only() -> AbstractContextManager[Any]:
    """Make tensors, also by `torch.load`, without their data in this block."""
    return FakeTensorMode()


def file_offset(x: Tensor) -> int:
    """Return where in its file a tensor's storage begins; the tensor was loaded under `shapes_only`."""
    offset = x.untyped_storage()._checkpoint_offset
    assert offset is not None
    return offset


def save_without_data(state: Any, file: Any) -> None:
    """Save tensors made under `shapes_only`, with a hole in the file for their data."""
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, file)


def start_fake_group(rank: int, size: int) -> None:
    """Start the default process group of one rank of many without the others; its collectives send nothing."""
    # Results have the right shapes but no meaning: torch's fake backend copies this rank's input.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # lazy: it registers the backend

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


# The first six are dicts of process groups.
_GROUP_STATE = (
    "_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag", "_group_count",
    "_world", "_backend", "_default_pg_init_method",
)  # fmt: skip
# Numbers of groups in fake worlds. They become names of groups in C++, so they must differ from those of real groups.
_fake_groups = itertools.count(1 << 40, 1 << 20)


@contextmanager
def fake_world(rank: int, size: int) -> Generator[None]:
    """Hide the process groups in this block, and be one rank of a fake world instead."""
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
    """Make tensors without values in this block; operations also accept earlier, real tensors."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def keep_unequal(mesh: DeviceMesh) -> None:
    """Make a mesh of a fake world unequal to all real ones, which torch's caches would otherwise return for it."""
    mesh._thread_id = -1
    mesh._hash = None


def _known(owner: Any, name: str, before: str) -> str:
    """Return the name of a collective in this version: torch 2.13 renamed these, and warns about the older names."""
    return name if hasattr(owner, name) else before


_ALL_GATHER = _known(dist, "all_gather_single", "all_gather_into_tensor")
_REDUCE_SCATTER = _known(dist, "reduce_scatter_single", "reduce_scatter_tensor")
_ALL_GATHER_SEVERAL = _known(dist.ProcessGroup, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")


def all_gather_several(gathered: list[Tensor], own: list[Tensor], *, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of several tensors."""
    return getattr(group, _ALL_GATHER_SEVERAL)(gathered, own)


def all_gather_single(
    gathered: Tensor, own: Tensor, *, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """All-gather a tensor of every rank of a group into one."""
    return getattr(dist, _ALL_GATHER)(gathered, own, group=group, async_op=async_op)


def reduce_scatter_single(
    own: Tensor, rows: Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Reduce-scatter rows over a group: sum them, and keep this rank's row."""
    return getattr(dist, _REDUCE_SCATTER)(own, rows, group=group, async_op=async_op)


def new_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """Make a group of some ranks, with the default group's backend; None on a rank outside. All ranks call it."""
    group = dist.new_group(list(ranks), timeout=timeout)
    return group if isinstance(group, dist.ProcessGroup) else None


def holders_of(group: dist.ProcessGroup) -> int:
    """Return the reference count of a group; only differences are meaningful."""
    # torch has no other way to find out whether a group is in use; users in C++ hold it through Python.
    return sys.getrefcount(group)


def close_group(group: dist.ProcessGroup) -> None:
    """Destroy a group after its pending collectives; its threads and connections end with the last reference."""
    devices.synchronize()
    dist.destroy_process_group(group)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group's collectives, the same for all of its backends."""
    host = torch.device("cpu")
    return group._get_backend(host if host in group._device_types else group._device_types[0]).options._timeout


def flight_record() -> str | None:
    """Return torch's flight record of pending collectives, as JSON; None without a recorder."""
    module = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # the second for every backend, in newer torch
        dump: Any = getattr(module, name, None)
        text = "" if dump is None else dump(includeCollectives=True, onlyActive=True).decode(errors="replace")
        if '"entries"' in text:
            return text
    return None


def save_record(x: object, file: Any) -> None:
    """Save like `torch.save`, but without the CRC32, which costs as much as a sha256 and which torch never checks."""
    # torch's own option for this is global, so it would affect other threads.
    writer = torch._C.PyTorchFileWriter(file, False, 64)
    torch.serialization._save(x, writer, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    writer.write_end_of_file()


def device_mesh_of(
    groups: Sequence[dist.ProcessGroup], device_type: str, names: tuple[str, ...], grid: Tensor
) -> DeviceMesh:
    """Make a DeviceMesh of existing process groups, one per dim, and keep them alive with it."""
    mesh = DeviceMesh.from_group(list(groups), device_type, mesh=grid, mesh_dim_names=names)
    kept_by(mesh)["groups"] = tuple(groups)  # some versions of torch only store their names
    return mesh


_TORCHS: dict[tuple[type[Any], str], Callable[..., Any]] = {}
"""The original methods that ours replace, by class and name."""


def _replace(cls: type[Any], name: str, ours: Callable[..., Any]) -> None:
    if (cls, name) not in _TORCHS:
        _TORCHS[cls, name] = getattr(cls, name)
        setattr(cls, name, functools.update_wrapper(ours, _TORCHS[cls, name]))


def describe_mesh(mesh: DeviceMesh, describe: Callable[[], str]) -> None:
    """Append a text to the `repr` of a mesh."""
    # Not a subclass: compilers recognize exactly torch's class.
    _replace(DeviceMesh, "__repr__", _described_repr)
    kept_by(mesh)["describe"] = describe


def _described_repr(mesh: DeviceMesh) -> str:
    text = _TORCHS[DeviceMesh, "__repr__"](mesh)
    describe = kept_by(mesh).get("describe")
    return text if describe is None else f"{text.removesuffix(')')}, {describe()})"


def copy_of_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Copy a DeviceMesh with the same process groups and empty caches."""
    result = DeviceMesh.__new__(DeviceMesh)
    vars(result).update({name: value for name, value in vars(mesh).items() if name != _NAME})
    return result


def refuse_full_tensor(mesh: DeviceMesh, refuse: Callable[[DTensor], NoReturn]) -> None:
    """Replace `full_tensor` of every DTensor on a mesh, also of results that torch computes."""
    _replace(DTensor, "full_tensor", _full_tensor)
    kept_by(mesh)["full_tensor"] = refuse


def enclose_full_tensor(enclose: Callable[[DTensor], AbstractContextManager[Any]]) -> None:
    """Run `full_tensor` of every DTensor inside a context manager."""
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
    """Make a DeviceMesh without process groups, as one of its ranks sees it."""
    mesh = DeviceMesh(device_type, grid, mesh_dim_names=names, _init_backend=False, _rank=rank)
    mesh._dim_group_names = []
    return mesh


def torch_pipeline_order(name: str, ranks: int, local: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """Return the order of computations in a schedule of torch: for each rank, (F, B, I or W; stage; microbatch)."""
    # Its schedules take modules and process groups, but only use numbers. An overlapped F and B become two entries.
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
    """Run torch's fused AdamW kernel: update params, mu, nu and, unless scale is 1, grads in place."""
    # The CPU kernel reads as many elements of each column as the parameter has, without bounds checks: check sizes
    # first. A rate and a scale in 0-d tensors cause no host sync. If `finite` (bool, 0-d) is false, nothing is updated.
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
        # The CPU kernel takes the rate as a float64, device kernels as a float32. torch has no fake kernel with a rate
        # in a tensor, and would run the real one.
        lr = 0.0 if is_fake(params[0]) else lr if device.type == "cpu" else lr.float()
    found_inf = None if finite is None else finite.logical_not().float()
    try:
        torch._fused_adamw_(
            params, grads, mu, nu, [], steps,
            lr=lr, **settings, amsgrad=False, maximize=False, grad_scale=divisor, found_inf=found_inf,
        )  # fmt: skip
    except RuntimeError as error:
        # The kernel itself checks dtypes and devices.
        raise LayoutError(_unlike(columns)) from error


class KeyBlock(NamedTuple):
    """A block of keys and values, with the mask and scale of attention to it."""

    k: Tensor
    v: Tensor
    mask: Tensor | None  # added to the scores
    causal: bool
    scale: float | None  # factor of the scores; default: 1 / sqrt(head dim)


def attend_block(q: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    """Attend to one block of keys; return the output and the log-sum-exp of the scores, float[B, H, T]."""
    # H is a multiple of the heads of k and v. The mask has the dtype of q and finite values: for a row of -inf, the CPU
    # kernel returns a log-sum-exp of 0. An empty q or k crashes the process.
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
    """Compute one block's contribution to the gradient of q, and the gradients of its k and v."""
    # `out` and `lse` are of the attention to all blocks, so exp(score - lse) is the weight of a key among all keys.
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
    """Return which attention kernel of a device type returns log-sum-exps; "plain" is matrix products."""
    if device_type == "cpu":
        return "cpu"
    name, key = "aten::_scaled_dot_product_efficient_attention", torch._C._dispatch_key_for_device(device_type)
    return "efficient" if torch._C._dispatch_has_kernel_for_dispatch_key(name, key) else "plain"


def _scores(q: Tensor, block: KeyBlock) -> Tensor:
    """Compute the scores of a block in float32 or wider: [B, H, T, S]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ _for_each_head(block.k, q).to(wide).mT * _scale(q, block.scale)
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores if block.mask is None else scores + block.mask


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _sum_of_heads(grad: Tensor, k: Tensor) -> Tensor:
    """Sum the gradients of the query heads that share a key head."""
    return grad.unflatten(1, (k.shape[1], -1)).sum(2)


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for each query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] < q.shape[1] else x


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Expand a mask to all heads, with rows aligned as the CUDA kernel requires."""
    if mask is None:
        return None
    size = k.shape[2]
    padded = torch.nn.functional.pad(mask, (0, -size % 16))[..., :size]
    return padded.expand(q.shape[0], q.shape[1], q.shape[2], size)


@functools.cache
def call_first_at_exit(fn: Callable[[], bool]) -> None:
    """Call a function once at exit, before the functions of `atexit`; if it returns True, the exit status is 1."""
    # An exception in an `atexit` function doesn't change the status. So this one runs the others and exits the process.

    def end() -> None:
        if fn():
            atexit.unregister(end)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    # threading's functions run before those of `atexit`, which run last registered first.
    threading._register_atexit(lambda: atexit.register(end))


# --------------------------------------------------------------------------------------------------------- fake tensors
def is_fake(x: Tensor) -> bool:
    """Return whether a tensor has no values, as under `FakeTensorMode`; its device may not exist here."""
    return isinstance(x, FakeTensor)
