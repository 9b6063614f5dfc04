"""One call of a functionalized module: a copy without weights, whose units gather theirs when they are called.

Guarantee: a forward that changes tensors of the module, or uses random numbers without a key, is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsharding.base import _compat, _functorch, tree
from fsharding.base.errors import FshardingError, TransformError, report
from fsharding.base.scoped import scoped
from fsharding.comm.leaf_memory import device_of
from fsharding.formats.quantized import dequantize
from fsharding.interop.module.copying import copy_module
from fsharding.interop.module.initializers import LazyLeaf, generator_bytes, lazy_leaves, real_buffers, seed_of
from fsharding.interop.module.layers import Bare, Entrances, install
from fsharding.interop.module.mutation_guard import Original, Watch
from fsharding.interop.module.planning import ModulePlan, places_of
from fsharding.interop.module.structure import FUNCTION
from fsharding.mesh.abstract_mesh import DATA_AXES
from fsharding.mesh.consistency import checksum
from fsharding.mesh.device_mesh import Mesh, axis_index, axis_size, set_mesh
from fsharding.mesh.failures import order_here
from fsharding.mesh.unit_order import SAME_CONSTANTS
from fsharding.sharding import random
from fsharding.sharding.leaf_names import joined
from fsharding.sharding.named_sharding import Local, typeof
from fsharding.transforms import policies
from fsharding.transforms.gather_context import current_context, is_evaluating, prefetch_depth
from fsharding.transforms.gather_unit import UnitsAhead, gather_unit
from fsharding.transforms.remat import remat
from fsharding.transforms.scan import unstack_units

__all__ = ["Engine", "Run", "computing"]


class _Absent(Tensor):
    """Placeholder of a weight whose unit isn't gathered: it has a shape, and can't be computed with."""

    path: str
    home: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == cls.device.__get__:
            return getattr(args[0], "home", torch.device("cpu"))
        run = _running.get()
        if func == _DTYPE.__get__ and run is not None:
            return run.dtype_of(args[0].path)
        name = getattr(func, "__name__", "")
        if name in _TYPED and run is not None and not (name in _OF_OTHERS and isinstance(args[0], _Absent)):
            args, kwargs = tree.map(lambda x: run.like(x) if isinstance(x, _Absent) else x, (args, kwargs or {}))
            return func(*args, **kwargs)
        if name in ("__get__", "detach", "requires_grad_", "size", "dim", "numel", "is_floating_point", "__repr__"):
            return super().__torch_function__(func, types, args, kwargs or {})
        rows = [getattr(x, "path", "") for x in tree.leaves((args, kwargs)) if isinstance(x, _Absent)]
        if not _guarded.get():
            raise _Elsewhere(_recomputing([f"{row} is used by {name}" for row in rows]))
        text = f"needs weights that are used only inside their unit; {name} used them outside."
        mend = "Remove their module from units, or gather both modules together: units=(('embed', 'head'), ...)."
        raise _Elsewhere(report(f"{FUNCTION} {text}", rows, mend))


_DTYPE: Any = Tensor.dtype
_OF_OTHERS = ("to", "type_as")
_TYPED = (*_OF_OTHERS, "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
"""Functions that use only the dtype and the device of a weight, in `x.to(weight)` or `weight.new_zeros(3)`."""


class _Elsewhere(FshardingError, RuntimeError):
    """A weight is used outside of its unit. Not a TypeError, which binary operators of tensors catch."""


def _absent(name: str, parameter: nn.Parameter) -> Any:
    with _compat.with_values():
        hollow = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
        result: Any = nn.Parameter(hollow.as_subclass(_Absent), requires_grad=parameter.requires_grad)
    result.path = name
    return result


_ODD = 0x9E3779B97F4A7C15
"""Distance of consecutive seeds, so that all their bits differ (the increment of splitmix64)."""

_running: ContextVar[Run | None] = ContextVar("fsharding_module_run", default=None)
_guarded: ContextVar[bool] = ContextVar("fsharding_module_guarded", default=False)


class Engine:
    """A copy of the module without weights, whose units get theirs from the current run."""

    def __init__(self, plan: ModulePlan, *, idle: Sequence[str] = ()) -> None:
        """Copy a module; its idle parts never run."""
        module, anatomy = plan.module, plan.anatomy
        self.plan = plan
        own = {n: m for n, m in module.named_modules() if m.training and getattr(m, "gradient_checkpointing", False)}
        if rows := [f"{n or 'the module'} is {type(m).__name__}, gradient_checkpointing=True" for n, m in own.items()]:
            raise TransformError(_recomputing(rows))
        # The copy gets these instead of its parameters; a call of a unit replaces them by its weights.
        absent = {id(p): _absent(name, p) for name, p in module.named_parameters()}
        self._absent = list(absent.values())
        buffers = real_buffers(module, plan.reset)
        self.module: nn.Module = copy_module(module, absent)
        for name, value in buffers.items():
            owner, _, last = name.rpartition(".")
            setattr(self.module.get_submodule(owner), last, value)
        # `open`, called later, wraps the forwards that `install` sets.
        self.entrances: Entrances = install(self.module, plan.roles.roles)
        self.places = places_of(self.module)
        self.units = anatomy.units
        members = (member for unit in anatomy.units for member in unit.members)
        self._inside = {path: {id(part) for part in self.module.get_submodule(path).modules()} for path in members}
        self.stored = {leaf.path: leaf.dtype for leaf in anatomy.leaves}
        self.leaf_of = {weight.name: weight.leaf for unit in anatomy.units for weight in unit.weights}
        # Idle blocks keep their buffers on the original device: `move` and `begin` would copy what never runs.
        running = {n: m for n, m in self.module.named_modules() if not n.startswith(tuple(f"{b}." for b in idle))}
        self._watch = Watch(running)
        self._home = None
        # By member, None for the root: the module with its original forward, and the buffers that it uses.
        self._bare: dict[str | None, Bare] = {None: Bare(self.module, self.module.__call__)}
        self.buffers: dict[str | None, dict[str, str]] = {None: self._buffers_in(None)}
        self._checksums: dict[str, int] | None = None
        rates = {name: (m, getattr(m, "p", None)) for name, m in self.module.named_modules() if m.training}
        active = {name: m for name, (m, p) in rates.items() if isinstance(p, float) and p > 0}
        self.drops = [f"{name} is {m}" for name, m in active.items() if "Drop" in type(m).__name__]
        self.tensors = self._watch.tensors  # the current tensors other than parameters, by name
        self.original = Original(module, self.tensors)

    def first_values(self, key: Tensor) -> dict[str, LazyLeaf]:
        """Return the initial values of the leaves by path; refuse a module that was changed since it was copied."""
        self.original.check()
        return lazy_leaves(self.plan.module, self.plan.anatomy.leaves, key, self.plan.reset)

    def constants(self) -> dict[str, Tensor]:
        """Return the buffers and tensor attributes that no forward writes, by name. They must be equal on all ranks."""
        return {name: x for name, x in self.tensors().items() if name not in self.plan.written}

    def _buffers_in(self, member: str | None) -> dict[str, str]:
        """Map names under `inner` to the buffers that the forward of a member uses; None is the root."""
        # A buffer belongs to the innermost members that contain it, or to the root if none does.
        inner = self.module if member is None else self.module.get_submodule(member)
        paths = {id(part): path for path, part in reversed([*inner.named_modules()])}
        result: dict[str, str] = {}
        for name, place in self.places.items():
            around = [path for path, parts in self._inside.items() if id(place.owner) in parts]
            least = min((len(self._inside[path]) for path in around), default=0)
            if (member is None and not around) or (member in around and len(self._inside[member]) == least):
                result[joined("inner", paths[id(place.owner)], place.key)] = name
        return result

    @contextmanager
    def _in_mode(self) -> Generator[None]:
        """Put the module in eval mode inside `fs.evaluate`."""
        trained = [part for part in self.module.modules() if part.training] if is_evaluating() else []
        for part in trained:
            part.training = False
        try:
            yield
        finally:
            for part in trained:
                part.training = True

    def persistent(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the buffers of a state dict by every name, and the first names of those that the forward writes."""
        names = {(id(place.owner), place.key): name for name, place in self.places.items()}
        found = [
            (joined(path, key), names[id(owner), key], buffer)
            for path, owner in self.module.named_modules(remove_duplicate=False)
            for key, buffer in _compat.persistent_buffers(owner).items()
        ]
        written = {every: name for every, name, _ in found if name in self.plan.written}
        return {every: buffer for every, _, buffer in found}, written

    def open(self) -> None:
        """Replace the forwards of units by `_enter`, which gathers their weights."""
        for number, unit in enumerate(self.units):
            for member in unit.members:
                inner = self.module.get_submodule(member)
                self._bare[member] = Bare(inner, inner.forward)
                self.buffers[member] = self._buffers_in(member)
                inner.forward = functools.partial(_enter, number, member)

    def run(
        self,
        member: str | None,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        args: Any,
        kwargs: Any,
        seed: int | None,
        mesh: Mesh | None,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run the forward of a unit's member, or of the root; return its result and the buffers after it."""
        device = next((x.device for x in weights.values()), "cpu")
        cut = 0 if member is None else len(member) + 1
        places = {inner: name for inner, name in self.buffers[member].items() if name in buffers}
        named = {f"inner.{name[cut:]}": x for name, x in weights.items()}
        # Copies, because remat may run it again in backward, with the original buffers.
        named |= {inner: _compat.copied(buffers[name]) for inner, name in places.items()}
        with self.entrances.drawing(seed, device), computing(mesh):
            result = torch.func.functional_call(self._bare[member], named, args, kwargs, tie_weights=False)
        # `functional_call` stores buffers that the forward assigned in `named`.
        return result, {name: named[inner] for inner, name in places.items()}

    @contextmanager
    def guard(self, leaves: Iterable[Any], *, keyed: bool) -> Generator[None]:
        """Move constants to the device of the leaves; refuse a block that changes them or draws without a key."""
        # Inside `fs.evaluate` the module is in eval mode: dropout is off and needs no key.
        if self.drops and not keyed and not is_evaluating():
            raise TransformError(_keyless(self.drops))
        known = (x for x in leaves if isinstance(x, Local | Tensor))
        found = (device_of(x.value, x.sharding.device_type) if isinstance(x, Local) else x.device for x in known)
        device = next(found, torch.device("cpu"))
        # Move before `begin`: replacing tensors by copies on a device would look like a change by the forward.
        self._note_constants()
        self._move(device)
        self._watch.begin()
        state = generator_bytes(device)
        with scoped(_guarded, True):
            with _worded(), self._in_mode():
                yield
            self.entrances.clear()
            changed = self._watch.end()
        if changed:
            raise TransformError(_changing(changed))
        if not keyed and state != generator_bytes(device):
            raise TransformError(_keyless([f"{type(self.module).__name__} in its forward"]))

    def _note_constants(self) -> None:
        """Add the constants to the facts that the ranks of a collective call compare; hash them once."""
        order = order_here()
        if order is None or _compat.makes_fakes():
            return
        if self._checksums is None:
            self._checksums = {name: checksum(x) for name, x in self.constants().items() if not x.is_meta}
        if sums := self._checksums:
            # A function of the dict alone: the note outlives the call and must not keep the module alive.
            order.note(SAME_CONSTANTS, (*sums.items(),), functools.partial(_checksums_text, sums), None)

    def _move(self, device: torch.device) -> None:
        """Move constants to the device of the weights; under `FakeTensorMode` they have no values."""
        home = device, _compat.fake_mode()
        if home == self._home:
            return
        self._home = home
        self._watch.move(device)
        for absent in self._absent:
            absent.home = device


def _enter(number: int, member: str, /, *args: Any, **kwargs: Any) -> Any:
    """Forward of a unit's member: the current run calls the original forward with weights."""
    run = _running.get()
    if run is None:
        raise TransformError(_recomputing([f"{member} is called again"]))
    return run.enter(number, member, args, kwargs)


def _checksums_text(checksums: Mapping[str, int]) -> str:
    return ", ".join(f"{name} of checksum {number:016x}" for name, number in checksums.items())


class Run:
    """One call of a module: its leaves, gathered units, buffers, and seed."""

    # `buffers` has the values that the forward has written so far. A unit takes its buffers as inputs and returns new
    # ones, so recomputing it in backward starts from the same values and its new ones are dropped.

    def __init__(
        self, engine: Engine, leaves: Mapping[str, Any], key: Tensor | None, buffers: Mapping[str, Tensor] | None
    ) -> None:
        self._engine = engine
        self._leaves = leaves
        self.buffers = _given(engine, buffers)
        self._inputs = _compute_dtype(engine.stored, leaves) if engine.plan.options.cast_inputs else None
        # A gather recognizes prefetched leaves by the identity of their tensors, so build rows and trees of units once.
        self._rows: dict[str, Any] = {}
        self._trees: dict[int, dict[str, Any]] = {}
        # Units of several members keep their weights until the call ends: any member may be called again.
        self._together: dict[int, dict[str, Tensor]] = {}
        self._entered = 0
        shardings = (typeof(x).sharding for x in leaves.values() if isinstance(x, Local | DTensor))
        self._mesh = next((s.mesh for s in shardings if s is not None), None)
        self._first_seed: int | None = None
        if key is not None:  # data ranks have different tokens and need different masks
            where = 0
            for axis in DATA_AXES:
                where = where * axis_size(axis, self._mesh) + axis_index(axis, self._mesh)
            self._first_seed = seed_of(random.fold_in(key, where))

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run the module."""
        engine = self._engine
        keyed = self._first_seed is not None
        with engine.guard(self._leaves.values(), keyed=keyed), scoped(_running, self):
            root = self._gather(0)
            args, kwargs = _cast(args, kwargs, self._inputs)
            result, new = engine.run(None, root, self.buffers, args, kwargs, self._seed(), self._mesh)
        self._keep(new)
        return result

    def _keep(self, new: Mapping[str, Tensor]) -> None:
        """Store the buffers that a part of the forward has written."""
        self.buffers |= {name: x.detach() for name, x in new.items()}

    def enter(self, number: int, member: str, args: Any, kwargs: Any) -> Any:
        """Run a member of a unit with its weights."""
        engine = self._engine
        unit = engine.units[number]
        args, kwargs = _cast(args, kwargs, self._inputs)
        if len(unit.members) > 1:
            if number not in self._together:
                self._together[number] = self._gather(number)
            weights = {n: x for n, x in self._together[number].items() if n.startswith(f"{member}.")}
        else:
            weights = self._gather(number)
        buffers = {name: self.buffers[name] for name in engine.buffers[member].values() if name in self.buffers}
        seed, mesh = self._seed(), self._mesh

        # It must not capture `self`: remat keeps it until backward, and a run holds all gathered weights.
        def run(weights: Any, buffers: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
            return engine.run(member, weights, buffers, args, kwargs, seed, mesh)

        run.__name__ = member
        call = run if unit.stack is None else remat(run, policy=engine.plan.options.policy)
        result, new = call(weights, buffers, args, kwargs)
        self._keep(new)
        return result

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a weight will be gathered."""
        dtype = _dtype(self._leaves[self._engine.leaf_of[name]])
        context = current_context()
        return dtype if context is None or not dtype.is_floating_point else context.compute_dtype(dtype)

    def like(self, absent: _Absent) -> Tensor:
        """Make a tensor without memory that has the dtype, device and shape of a weight."""
        return torch.zeros((), dtype=self.dtype_of(absent.path), device=absent.device).expand(absent.shape)

    def _gather(self, number: int) -> dict[str, Tensor]:
        """Gather the weights of a unit by name, dequantized, since modules need tensors; prefetch the next units."""
        # The policy of the options is for blocks of stacks; other units always use the default.
        units = self._engine.units
        of_blocks = self._engine.plan.options.policy
        policy = of_blocks if units[number].stack is not None else policies.save_except_gathered
        ahead = range(number + 1, min(number + 1 + prefetch_depth(), len(units)))
        following = UnitsAhead(self._tree(n) for n in ahead)
        weights = gather_unit(self._tree(number), policy=policy, next_unit=following)
        return {name: dequantize(w) for name, w in weights.items()}

    def _tree(self, number: int) -> dict[str, Any]:
        if number not in self._trees:
            weights = self._engine.units[number].weights
            values = {w.name: self._leaves[w.leaf] if w.row is None else self._row(w.leaf, w.row) for w in weights}
            self._trees[number] = values
        return self._trees[number]

    def _row(self, leaf: str, row: int) -> Any:
        if leaf not in self._rows:
            self._rows[leaf] = unstack_units(self._leaves[leaf])
        return self._rows[leaf][row]

    def _seed(self) -> int | None:
        """Return a new seed for the unit that is entered."""
        if self._first_seed is None:
            return None
        # Count calls, not units: a unit that is called twice needs different masks.
        self._entered += 1
        return (self._first_seed + self._entered * _ODD) % 2**64


def _given(engine: Engine, buffers: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Check the buffers that a call starts with."""
    given = {} if buffers is None else {**buffers}
    rows = [f"{name} is written by the forward, and not given" for name in engine.plan.written if name not in given]
    rows += [f"{name} is given, and isn't a buffer of the module" for name in given if name not in engine.places]
    if rows:
        mend = (
            "Add the argument buffers to the loss, call out, buffers = net(params, x, buffers=buffers), and return"
            " (loss, buffers). Or put modules in eval mode before fs.functionalize, to train with fixed statistics."
        )
        raise TransformError(report(f"{FUNCTION} needs the buffers that its forward writes.", rows, mend))
    return given


def _dtype(leaf: Any) -> torch.dtype:
    return (leaf.value if isinstance(leaf, Local) else leaf).dtype


def _compute_dtype(stored: Mapping[str, torch.dtype], leaves: Mapping[str, Any]) -> torch.dtype | None:
    """Find the dtype to cast floating inputs to; None if parameters have the module's dtypes."""
    # The compute dtype of the running precision. Without one, parameters of a single dtype other than the module's are
    # copies that a precision has cast.
    context = current_context()
    if context is not None and context.cast is not None:
        return context.cast
    given = {path: _dtype(leaves[path]) for path, was in stored.items() if was.is_floating_point}
    found = {dtype for path, dtype in given.items() if dtype != stored[path]}
    return found.pop() if len(found) == 1 else None


def _cast(args: Any, kwargs: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating tensors of inputs; return the same objects if there is nothing to cast."""
    if dtype is None:
        return args, kwargs
    leaves, spec = tree.flatten((args, kwargs))
    cast = [_cast_leaf(x, dtype) for x in leaves]
    return tree.unflatten(spec, cast) if any(map(operator.is_not, cast, leaves)) else (args, kwargs)


def _cast_leaf(x: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor, or the tensors in a copy of a container; return `x` itself if nothing changes."""
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if hasattr(x, f.name)}
        # `object.__setattr__` also sets fields of frozen dataclasses.
        put: Any = type(x).__setattr__ if isinstance(x, dict) else object.__setattr__
    elif isinstance(x, dict):
        fields, put = {**x}, type(x).__setitem__
    elif isinstance(x, list):
        fields, put = dict(enumerate(x)), type(x).__setitem__
    elif isinstance(x, set | frozenset):
        items = {_cast_leaf(item, dtype) for item in x}
        return type(x)(items) if any(item not in x for item in items) else x
    else:
        return x
    _, cast = _cast((), fields, dtype)
    changed = {name: value for name, value in cast.items() if value is not fields[name]}
    if not changed:
        return x
    x = copy.copy(x)
    for name, value in changed.items():
        put(x, name, value)
    return x


@contextmanager
def computing(mesh: Mesh | None) -> Generator[None]:
    """Run modules in this block: on a mesh, if given, and under torch.func with kernels that have every derivative."""
    with (
        nullcontext() if mesh is None else set_mesh(mesh),
        sdpa_kernel(SDPBackend.MATH) if _functorch.in_functorch() else nullcontext(),
    ):
        yield


@contextmanager
def _worded() -> Generator[None]:
    """Reword errors of torch and its transforms that show that a module can't be a pure function."""
    try:
        yield
    except _Elsewhere as error:
        raise TransformError(str(error)) from None
    except RuntimeError as error:
        text = str(error)
        if _functorch.in_functorch() and any(words in text for words in _IN_PLACE):
            raise TransformError(_changing([f"under torch.func: {text.splitlines()[0]}"])) from error
        if "forward AD" in text and "_grouped_mm" in text:
            raise TransformError(report(_GROUPED, (), _EAGER)) from error
        raise


_IN_PLACE = ("would mutate a captured Tensor", "vmap: inplace arithmetic")
_GROUPED = f"{FUNCTION} cannot differentiate grouped products of experts by forward mode: torch has no such derivative."
_EAGER = "Make the module with experts_implementation='eager' in its config, or use reverse mode: torch.func.grad, vjp."


def _changing(rows: list[str]) -> str:
    mend = (
        "Name the buffers that the forward writes: fs.functionalize(module, units, buffers='name'). Keep other state"
        " outside of the module: pass it as an input, and return it as an output."
    )
    return report(f"{FUNCTION} needs a forward that changes no tensors of the module.", rows, mend)


def _recomputing(rows: list[str]) -> str:
    mend = "Switch its own checkpointing off, and pass policy=fs.policies.nothing_saveable, which recomputes blocks."
    return report(f"{FUNCTION} needs a module that does not run its layers again in the backward pass.", rows, mend)


def _keyless(rows: list[str]) -> str:
    mend = "Pass random_key=, a different one at each step, or put the module in eval mode before functionalize."
    return report(f"{FUNCTION} needs a random_key for a forward that draws.", rows, mend)
