"""Bring your own module: `functionalize` makes a pure function of its parameters out of an nn.Module.

In: a module, and patterns that say which of its modules are gathered and let go together. Out: a `PureModule`, which
`plan_layout` and `init_state` take as a model, and which is called inside a loss function: `net(params, *inputs)`.
The module's own forward runs, whatever it does; where it calls a unit, the unit's weights are gathered, used, and let
go, the next ones on their way. Law: outputs and gradients are those of the module on one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsharding import _compat, policies, random, tree
from fsharding.anatomy import FUNCTION, Anatomy, ModuleUnit, NameTable, UnitPatterns, nested, plan_module
from fsharding.axes import DATA_AXES
from fsharding.errors import ConfigError, TransformError, message
from fsharding.families import family_of
from fsharding.mesh import Mesh, axis_index, axis_size, set_mesh
from fsharding.module_axes import Bare, Entrances, Roles, check_axes, install
from fsharding.module_values import Reset, lazy_leaves, random_state, real_buffers, seed_of, seeded
from fsharding.planning import type_text
from fsharding.policies import Policy
from fsharding.scan import unstack_units
from fsharding.sharding import Local, typeof
from fsharding.spec import AxisRules
from fsharding.transforms import gather_unit, remat
from fsharding.tree import Tree

__all__ = ["PureModule", "functionalize"]


class PureModule:
    """A module as a function of its parameters. It holds no parameters; `init` reads them from the module it is of.

    Attributes:
        anatomy: leaves and units, printable.
        names: tree of tuples of dim names, for `plan_layout`.
        frozen: paths of leaves whose parameters do not require gradients; `plan_layout` freezes them.
        sources: what the leaves are called in a state dict of the module, for `checkpoint.load_weights` and `export`:
            `layers.up.weight` is `layers.{i}.up.weight`. Stacks whose blocks are not numbered from 0 are left out.
    """

    def __init__(
        self,
        module: nn.Module,
        anatomy: Anatomy,
        *,
        roles: Roles,
        heads: Mapping[str, int],
        reset: Reset | None,
        policy: Policy,
    ) -> None:
        """Made by `functionalize`."""
        self.anatomy = anatomy
        self.names = nested({leaf.path: leaf.names for leaf in anatomy.leaves})
        self.frozen = tuple(x.path for x in anatomy.leaves if x.dtype.is_floating_point and not x.trainable)
        self.sources = {leaf.path: name for leaf in anatomy.leaves if (name := leaf.pattern()) is not None}
        self._module, self._reset, self._policy = module, reset, policy
        self._roles, self._heads = dict(roles), dict(heads)
        order, self._structure = tree.flatten(nested({leaf.path: i for i, leaf in enumerate(anatomy.leaves)}))
        self._order: list[int] = order
        self._engine = _Engine(module, anatomy, roles, real_buffers(module, reset))

    def init(self, key: Tensor) -> Tree:
        """First values, for `init_state`: those of the module's tensors; those on the meta device are drawn.

        Each rank takes its own slices. A parameter on the meta device is drawn whole, with all others of its submodule,
        and then cut; so the memory on top of the state is one submodule. After `init_state` the module may be moved to
        the meta device, which lets its memory go.

        Args:
            key: of what is drawn (int64[2]).

        Raises:
            ConfigError: parameters on the meta device that nothing draws; all are listed.
        """
        return nested(lazy_leaves(self._module, self.anatomy.leaves, key, self._reset))

    def check(self, mesh: Mesh, rules: AxisRules) -> None:
        """Raises where the module cannot be cut over the mesh; `plan_layout` calls it.

        Raises:
            ConfigError: a model axis over which some layer does not compute; all are listed.
        """
        check_axes(self.anatomy, self._roles, mesh, rules, self._heads)

    def __call__(self, params: Tree, *args: Any, random_key: Tensor | None = None, **kwargs: Any) -> Any:
        """What the module returns for these parameters; on a rank, for its part of the batch.

        Args:
            params: `Local` nodes, as a loss function gets them, DTensors at rest, or whole plain tensors.
            *args: of the module's forward.
            random_key: of what the forward draws, such as dropout masks (int64[2]). The same key gives the same masks
                on one mesh, under every strategy and policy. Ranks along data axes draw masks of their own, so another
                mesh gives other ones.
            **kwargs: of the module's forward.

        Raises:
            TransformError: the forward changes tensors of the module, draws without a key, or uses weights of a unit
                outside of it; all are listed.
            TreeError: the parameters are another module's.
        """
        flat = tree.flatten_up_to(self._structure, params, "PureModule")
        leaves = [leaf for _, leaf in sorted(zip(self._order, flat, strict=True), key=lambda pair: pair[0])]
        return _Run(self._engine, self._policy, leaves, random_key).forward(args, kwargs)

    def __str__(self) -> str:
        return f"PureModule of {type(self._module).__name__}, {self.anatomy}"


def functionalize(
    module: nn.Module,
    units: UnitPatterns | None = None,
    *,
    names: NameTable | None = None,
    roles: Roles | None = None,
    reset: Reset | None = None,
    policy: Policy = policies.save_except_gathered,
) -> PureModule:
    """Makes a pure function of its parameters out of a module, which is not changed.

    Args:
        module: with real tensors, or on the meta device. Whether it is in train mode is taken over. Its buffers are
            constants.
        units: paths of the modules that are gathered when they are called, and let go after it. In `"layers.*"` the
            star stands for one part of a path, and the blocks that it finds are stacked: one leaf `[L, ...]` for each
            parameter. `("embed", "layers.*", ("norm", "head"))` has a unit of one module, a stack, and two modules
            that are gathered together. A module belongs to the first pattern that fits it. What is in no unit is
            gathered first and stays until the end. Units are sent for in the order in which the module defines them.
            By default those of `fsharding.families`, for models of Hugging Face that stand there.
        names: dim names of leaves by pattern of the path, without that of a stack's first dim:
            `{"*.up.weight": ("mlp", "embed"), "*": None}`. By default those of the family, or none; a leaf without
            names is cut along its first dim.
        roles: of layers over `tp`, by pattern of the path; see `fsharding.module_axes`. By default those of the family.
        reset: fills the parameters and buffers of a submodule that are on the meta device, in place; it gets one
            submodule at a time, without its children. By default its own `reset_parameters`, or the family's.
        policy: what blocks of stacks keep for backward.

    Returns:
        A function `net(params, *inputs)` that is a model for `plan_layout` and `init_state`.

    Raises:
        ConfigError: patterns that find no units, buffers on the meta device, layers that cannot have their role.
        TreeError: blocks of one stack that are not alike.
        LayoutError: a leaf that `names` misses.
        TransformError: modules in train mode that change their buffers in forward. Of each kind all are listed.
    """
    family = family_of(module) if units is None else None
    if units is None and family is None:
        children = [f"{name} is {type(child).__name__}" for name, child in module.named_children()]
        mend = "Say which modules are gathered together, such as units='layers.*'."
        raise ConfigError(message(FUNCTION, f"does not know the units of {type(module).__name__}.", children, mend))
    _refuse_statistics(module)
    if family is not None:
        units, names, roles = units or family.units, names or family.names, family.roles if roles is None else roles
        reset = reset or (getattr(module, family.reset, None) if family.reset else None)
    assert units is not None
    anatomy = plan_module(module, units, names)
    heads = family.heads_of(module) if family is not None else {}
    return PureModule(module, anatomy, roles=roles or {}, heads=heads, reset=reset, policy=policy)


def _refuse_statistics(module: nn.Module) -> None:
    """Refuses modules of torch that are known to change their buffers in forward."""
    rows = [
        f"{name or 'the module'} is {type(m).__name__}: its forward changes {', '.join(dict(m.named_buffers()))}"
        for name, m in module.named_modules()
        if m.training and getattr(m, "track_running_stats", False) and dict(m.named_buffers())
    ]
    if rows:
        mend = "Put them in eval mode, or use a norm without statistics, such as nn.GroupNorm or nn.LayerNorm."
        raise TransformError(message(FUNCTION, "needs a forward that changes no buffers.", rows, mend))


class _Absent(Tensor):
    """The place of a weight while its unit is not gathered: it has a shape, and nothing can be computed with it."""

    path: str
    home: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == cls.device.__get__:
            return getattr(args[0], "home", torch.device("cpu"))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "detach", "requires_grad_", "size", "dim", "numel", "is_floating_point", "__repr__"):
            return super().__torch_function__(func, types, args, kwargs or {})
        rows = [getattr(x, "path", "") for x in tree.leaves((args, kwargs)) if isinstance(x, _Absent)]
        text = f"needs weights that are used where their unit is called; {name} asked for them elsewhere."
        mend = "Leave the module that has them out of units, or gather both together: units=(('embed', 'head'), ...)."
        raise TransformError(message(FUNCTION, text, rows, mend))


def _absent(name: str, parameter: nn.Parameter) -> Any:
    hollow = torch.empty_like(parameter, device="meta").detach().as_subclass(_Absent)
    result: Any = nn.Parameter(hollow, requires_grad=parameter.requires_grad)
    result.path = name
    return result


@dataclass
class _Constant:
    """A tensor of a module that is no parameter: a buffer, or a plain attribute."""

    name: str
    owner: nn.Module
    key: str
    value: Tensor


_running: ContextVar[_Run | None] = ContextVar("fsharding_module_run", default=None)


class _Engine:
    """A copy of the module without weights, whose units ask the current run for theirs."""

    def __init__(self, module: nn.Module, anatomy: Anatomy, roles: Roles, buffers: Mapping[str, Tensor]) -> None:
        absent = {id(p): _absent(name, p) for name, p in module.named_parameters()}
        self._absent = list(absent.values())
        self.module: nn.Module = copy.deepcopy(module, absent)
        for name, value in buffers.items():
            owner, _, last = name.rpartition(".")
            setattr(self.module.get_submodule(owner), last, value)
        self.entrances: Entrances = install(self.module, roles)
        self.units, self.bodies = anatomy.units, dict[str, Callable[..., Any]]()
        for number, unit in enumerate(anatomy.units):
            for member in unit.members:
                self._open(number, member)
        self._constants = list(_constants(self.module))
        self.drops = [
            f"{name} is {m}"
            for name, m in self.module.named_modules()
            if m.training and isinstance(p := getattr(m, "p", None), float) and p > 0 and "Drop" in type(m).__name__
        ]

    def _open(self, number: int, member: str) -> None:
        """Makes a member of a unit ask for its weights when it is called."""
        inner = self.module.get_submodule(member)
        bare = Bare(inner, inner.forward)

        def body(weights: dict[str, Tensor], args: Any, kwargs: Any, seed: int | None, mesh: Mesh | None) -> Any:
            device = next((x.device for x in weights.values()), "cpu")
            named = {f"inner.{name[len(member) + 1 :]}": x for name, x in weights.items()}
            with seeded(seed, device), _on(mesh):
                try:
                    return torch.func.functional_call(bare, named, args, kwargs, tie_weights=False)
                finally:
                    self.entrances.clear()

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = _running.get()
            assert run is not None
            return run.enter(number, member, args, kwargs)

        self.bodies[member] = body
        inner.forward = forward

    def move(self, device: torch.device) -> None:
        """Constants to the device of the weights."""
        for constant in self._constants:
            if constant.value.device != device:
                constant.value = constant.value.to(device)
                setattr(constant.owner, constant.key, constant.value)
        for absent in self._absent:
            absent.home = device

    def versions(self) -> list[int]:
        """How often each constant has been changed in place."""
        return [_compat.version_of(constant.value) for constant in self._constants]

    def refuse_changes(self, before: list[int]) -> None:
        """Refuses a forward that has changed constants, which get their place back.

        Raises:
            TransformError: it has; all are listed.
        """
        rows: list[str] = []
        for constant, version in zip(self._constants, before, strict=True):
            now = getattr(constant.owner, constant.key, None)
            if now is not constant.value or _compat.version_of(constant.value) != version:
                kind = type_text(tuple(constant.value.shape), constant.value.dtype)
                rows.append(f"{constant.name} is {kind}")
                setattr(constant.owner, constant.key, constant.value)
        if rows:
            mend = "Keep such state outside of the module: give it as an input, and return it as an output."
            text = "needs a forward that changes no buffers and no other tensors of the module."
            raise TransformError(message(FUNCTION, text, rows, mend))


def _constants(module: nn.Module) -> list[_Constant]:
    """Every tensor of a module that is no parameter."""
    return [
        _Constant(".".join(filter(None, (path, key))), child, key, value)
        for path, child in module.named_modules()
        for key, value in (*child.named_buffers(recurse=False), *vars(child).items())
        if isinstance(value, Tensor)
    ]


class _Run:
    """One call of a module: its leaves, what has been gathered, and what it draws with."""

    def __init__(self, engine: _Engine, policy: Policy, leaves: list[Any], key: Tensor | None) -> None:
        self._engine, self._policy, self._leaves, self._key = engine, policy, leaves, key
        self._rows: dict[int, Any] = {}
        self._trees: dict[int, dict[str, Any]] = {}
        self._together: dict[int, dict[str, Tensor]] = {}
        self._entered = 0
        shardings = (typeof(x).sharding for x in leaves if isinstance(x, Local | DTensor))
        self._mesh = next((s.mesh for s in shardings if s is not None), None)
        if key is not None:  # ranks along data axes have other tokens
            where = 0
            for axis in DATA_AXES:
                where = where * axis_size(axis, self._mesh) + axis_index(axis, self._mesh)
            self._key = random.fold_in(key, where)

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Runs the module."""
        engine = self._engine
        if self._key is None and engine.drops:
            raise TransformError(message(*_keyless(engine.drops)))
        first = next((x for x in self._leaves if isinstance(x, Local | Tensor)), None)
        device = torch.device("cpu") if first is None else (first.value if isinstance(first, Local) else first).device
        engine.move(device)
        before, state = engine.versions(), random_state(device)
        token = _running.set(self)
        try:
            root = self._gather(0)
            with seeded(self._seed(), device), _on(self._mesh):
                out = torch.func.functional_call(engine.module, root, args, kwargs, tie_weights=False)
        finally:
            _running.reset(token)
            engine.entrances.clear()
        engine.refuse_changes(before)
        if self._key is None and not torch.equal(state, random_state(device)):
            raise TransformError(message(*_keyless([f"{type(engine.module).__name__} in its forward"])))
        return out

    def enter(self, number: int, member: str, args: Any, kwargs: Any) -> Any:
        """Runs a member of a unit with its weights."""
        unit, body = self._engine.units[number], self._engine.bodies[member]
        if len(unit.members) > 1:
            if number not in self._together:
                self._together[number] = self._gather(number)
            weights = {n: x for n, x in self._together[number].items() if n.startswith(f"{member}.")}
        else:
            weights = self._gather(number)
        if unit.stack is None:
            return body(weights, args, kwargs, self._seed(), self._mesh)
        rest: list[Any] = []

        def tensors(*inputs: Any) -> tuple[Tensor, ...]:  # all that a transform can differentiate
            leaves, spec = tree.flatten(body(*inputs))
            rest[:] = [spec, [None if isinstance(x, Tensor) else x for x in leaves]]
            return tuple(x for x in leaves if isinstance(x, Tensor))

        found = iter(remat(tensors, policy=self._policy)(weights, args, kwargs, self._seed(), self._mesh))
        spec, others = rest
        return tree.unflatten(spec, [next(found) if x is None else x for x in others])

    def _gather(self, number: int) -> dict[str, Tensor]:
        """The weights of a unit by name; the next unit is sent for."""
        units = self._engine.units
        policy = self._policy if units[number].stack is not None else policies.save_except_gathered
        then = self._tree(number + 1) if number + 1 < len(units) else None
        return gather_unit(self._tree(number), policy=policy, then=then)

    def _tree(self, number: int) -> dict[str, Any]:
        if number not in self._trees:
            self._trees[number] = self._made(self._engine.units[number])
        return self._trees[number]

    def _made(self, unit: ModuleUnit) -> dict[str, Any]:
        return {w.name: self._leaves[w.leaf] if w.row is None else self._row(w.leaf, w.row) for w in unit.weights}

    def _row(self, leaf: int, row: int) -> Any:
        if leaf not in self._rows:
            self._rows[leaf] = unstack_units(self._leaves[leaf])
        return self._rows[leaf][row]

    def _seed(self) -> int | None:
        """A seed for the unit that is entered now."""
        if self._key is None:
            return None
        self._entered += 1
        return seed_of(random.fold_in(self._key, self._entered))


def _on(mesh: Mesh | None) -> AbstractContextManager[None]:
    return nullcontext() if mesh is None else set_mesh(mesh)


def _keyless(rows: list[str]) -> tuple[str, str, list[str], str]:
    mend = "Pass random_key=, another one at each step, or put the module in eval mode before functionalize."
    return FUNCTION, "needs a random_key for a forward that draws.", rows, mend
