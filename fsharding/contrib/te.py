"""Modules of Transformer Engine as pure functions: their fp8 state is leaves that go in and come out.

Guarantee: parameters, state and inputs in; outputs, gradients and the next state out; what stays in the module never
counts.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsharding import formats
from fsharding.base import _compat, _functorch, tree
from fsharding.base.errors import ConfigError, TransformError, TreeError, message, report
from fsharding.base.public import public
from fsharding.base.scoped import scoped
from fsharding.base.tree import Tree
from fsharding.formats import Blocks
from fsharding.interop.module import functionalize as modules
from fsharding.interop.module.functionalize import PureModule
from fsharding.interop.module.structure import NameTable, UnitPatterns, nested
from fsharding.mesh.device_mesh import Mesh, abstract, axis_group
from fsharding.sharding.named_sharding import Local, sharding_of, typeof
from fsharding.sharding.partition_spec import AxisRules
from fsharding.transforms import value_and_grad as losses
from fsharding.transforms.gather_unit import gather_unit

__all__ = ["STATE", "TeModule", "functionalize", "scaled_linear", "value_and_grad"]

_GRADS = "fs.te.value_and_grad"
STATE = "fp8_state"
"""The key of a `TeModule`'s parameter tree under which its fp8 state is."""

_NO_SETUP = "cannot be differentiated by torch.func: autograd Functions of Transformer Engine have no setup_context."
_GEMMS = {"Linear": 1, "LayerNormLinear": 1, "LayerNormMLP": 2}
"""How many products a layer has, each with three tensors in forward and two in backward that have a scale."""
_SIDES = {"scaling_fwd": 3, "scaling_bwd": 2}
_STATELESS = ("float8_current_scaling", "mxfp8", "float8_block_scaling")
"""Methods by which recipes say their kind, of those that keep nothing between calls."""


class _Layer(NamedTuple):
    """A layer with fp8 state: its path, and how many products it has."""

    path: str
    gemms: int


# -------------------------------------------------------------------------------------------------------- the package
def _package() -> ModuleType:
    """`transformer_engine.pytorch`."""
    try:
        return importlib.import_module("transformer_engine.pytorch")  # lazy: an extra that needs CUDA
    except (ImportError, OSError, RuntimeError) as error:
        mend = "On a machine with a CUDA toolchain: pip install 'fsharding[te]'."
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(message("needs Transformer Engine.", [why], mend)) from error


def _recipes() -> ModuleType:
    return importlib.import_module("transformer_engine.common.recipe")  # lazy: as above


def _autocast(package: ModuleType, recipe: Any, group: Any = None) -> Any:
    """The package's context of low precision, by the name that this version has for it."""
    if hasattr(package, "autocast"):
        return package.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)
    return package.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group)


def _is(recipe: Any, kind: str) -> bool:
    """Whether a recipe says that it is of a kind; older ones do not know newer kinds."""
    return bool(getattr(recipe, kind, bool)())


# --------------------------------------------------------------------------------------------------------- the module
@dataclass
class _Call:
    """The module with state that one `value_and_grad` has seen a call of."""

    module: TeModule | None = None


_calls: ContextVar[_Call | None] = ContextVar("fsharding_te_calls", default=None)


class TeModule(PureModule):
    """A module of Transformer Engine under a recipe, as a function of its parameters and its fp8 state.

    It is a model for `plan_layout` and `init_state` and is called inside a loss function, as a `PureModule` is. Under a
    recipe with state, its tree has one more entry, `te.STATE`: for each layer by path the `scale` and the
    `amax_history` of both directions. They are int32 with the bits of float32 numbers, so that no `Precision` rounds
    them, and no gradient is taken.

    Attributes:
        recipe: of the package.
        layers: paths of the layers with state; none under a recipe without.

    Example:
        >>> from importlib.util import find_spec
        >>> if torch.cuda.is_available() and find_spec("transformer_engine"):
        ...     from transformer_engine.common import recipe
        ...     from transformer_engine.pytorch import Linear
        ...     net = fs.te.functionalize(Linear(32, 32), recipe.DelayedScaling())
        ...     state = net.init(fs.random.key(0))[fs.te.STATE]
    """

    recipe: Any
    layers: tuple[_Layer, ...]

    def begin(self, recipe: Any, layers: tuple[_Layer, ...], package: ModuleType) -> None:
        """Says what it runs under; `functionalize` does."""
        vars(self).update(recipe=recipe, layers=layers)
        self._te = package
        self._looked = False
        if layers:
            names = {**self.names, STATE: tree.map(lambda x: (None,) * x.ndim, self._first("meta"))}
            vars(self).update(names=names)

    def _first(self, device: str = "cpu") -> Tree:
        """The state of a module that has never been called."""
        values: dict[str, Tensor] = {}
        for layer in self.layers:
            for side, tensors in _SIDES.items():
                path = ".".join(filter(None, (layer.path, side)))
                count = tensors * layer.gemms
                values[f"{path}.scale"] = _bits(torch.ones(count, device=device))
                values[f"{path}.amax_history"] = _bits(torch.zeros(self.recipe.amax_history_len, count, device=device))
        return nested(values)

    def init(self, key: Tensor) -> Tree:
        """First values, as `PureModule.init`; the fp8 state has scales of 1 and no amaxes."""
        params = super().init(key)
        return {**params, STATE: self._first()} if self.layers else params

    def check(self, mesh: Mesh, rules: AxisRules) -> None:
        """Raises where the module cannot be cut over the mesh; `plan_layout` calls it.

        Raises:
            ConfigError: as `PureModule.check`; or a recipe under which ranks would have states of their own.
        """
        super().check(mesh, rules)
        if self.layers and abstract(mesh).size > 1 and not self.recipe.reduce_amax:
            mend = "Make the recipe with reduce_amax=True: the state is one value for all ranks."
            raise ConfigError(message(f"got a recipe of one rank on the mesh {abstract(mesh)}.", mend=mend))

    @public
    @_compat.outside_of_graphs
    def __call__(self, params: Tree, *args: Any, random_key: Tensor | None = None, **kwargs: Any) -> Any:
        """Calls the module with these parameters, and its state, under its recipe.

        Args:
            params: as `PureModule` takes them, with the state under `te.STATE`.
            *args: of the module's forward.
            random_key: as `PureModule` takes it.
            **kwargs: of the module's forward.

        Raises:
            TransformError: under `torch.func`; with weights cached over microbatches; or a recipe with state outside of
                `fs.te.value_and_grad`, where gradients are taken: the next state would be lost.
        """
        if _functorch.in_functorch():
            mend = "Use fs.te.value_and_grad, or fs.value_and_grad with a recipe without state."
            raise TransformError(message(_NO_SETUP, mend=mend))
        if kwargs.get("is_first_microbatch") is not None:
            mend = "Leave is_first_microbatch out."
            raise TransformError(message("keeps no weights in fp8 between calls.", mend=mend))
        if not self.layers:
            with _autocast(self._te, self.recipe):
                result = super().__call__(params, *args, random_key=random_key, **kwargs)
            self._refuse_hidden()
            return result
        if not isinstance(params, Mapping) or STATE not in params:
            mend = "Give all of the tree that net.init makes; net.with_state(params, state) puts the next state in."
            raise TreeError(message(f"finds no {STATE!r} in the parameters.", mend=mend))
        self._note()
        weights = {key: value for key, value in params.items() if key != STATE}
        values = gather_unit(params[STATE])
        mesh = _mesh_of(params)
        with _autocast(self._te, self.recipe, _group(mesh)):
            self._write(values)
            return super().__call__(weights, *args, random_key=random_key, **kwargs)

    def with_state(self, params: Tree, state: Tree) -> Tree:
        """Parameters with another fp8 state, in the shardings of the one that they have.

        Args:
            params: with a state under `te.STATE`, at rest; unchanged.
            state: whole, as `fs.te.value_and_grad` gives it. {} is no change.
        """
        if not state:
            return params
        return {**params, STATE: tree.map(_placed, params[STATE], state)}

    def _note(self) -> None:
        """Tells the `value_and_grad` around that it has to read the state; refuses to lose it."""
        call = _calls.get()
        rows = [f"recipe {type(self.recipe).__name__} changes {len(self.layers)} layers' amaxes"]
        if call is None:
            if torch.is_grad_enabled():
                rule = "has fp8 state that a call changes, which would be lost."
                mend = "Differentiate with fs.te.value_and_grad, which returns the next state; "
                mend += "evaluate under torch.no_grad()."
                raise TransformError(message(rule, rows, mend))
            return
        if call.module is not None:
            rule = "can follow the fp8 state of one call of one module in a loss function."
            mend = "Put the modules into one nn.Module, and call it once for each microbatch."
            raise TransformError(report(f"{_GRADS} {rule}", rows, mend))
        call.module = self

    def _layer(self, path: str) -> Any:
        """A layer of the copy that runs, which has what the package's layers have."""
        return self.running.get_submodule(path)

    def _metas(self) -> Generator[tuple[str, Any]]:
        """The package's state of each layer and direction, by path."""
        for layer in self.layers:
            meta: Any = self._layer(layer.path).fp8_meta
            yield from ((".".join(filter(None, (layer.path, side))), meta[side]) for side in _SIDES)

    @torch.no_grad()
    def _write(self, values: Tree) -> None:
        """Puts a state into the module, in place: the package holds on to the tensors."""
        for layer in self.layers:
            self._layer(layer.path).init_fp8_metadata(num_gemms=layer.gemms)
        named = tree.named_leaves(values)
        for path, meta in self._metas():
            for name in ("scale", "amax_history"):
                getattr(meta, name).copy_(named[f"{path}.{name}"].view(torch.float32))

    @torch.no_grad()
    def read_state(self) -> Tree:
        """The state that the last forward and backward have left, whole; `fs.te.value_and_grad` returns it."""
        values = {
            f"{path}.{name}": _bits(getattr(meta, name).clone())
            for path, meta in self._metas()
            for name in ("scale", "amax_history")
        }
        return nested(values)

    def _refuse_hidden(self) -> None:
        """Refuses a recipe that turns out to keep tensors in the module, for which there are no leaves."""
        if self._looked:
            return
        rows = [
            f"{path or 'the module'} keeps {side}.{name}"
            for path, layer in self.running.named_modules()
            for side in _SIDES
            for name, x in getattr((getattr(layer, "fp8_meta", None) or {}).get(side), "__dict__", {}).items()
            if isinstance(x, Tensor)
        ]
        if rows:
            rule = f"got a recipe with state outside of leaves, {type(self.recipe).__name__}."
            raise TransformError(message(rule, rows, _KNOWN))
        self._looked = True


def _bits(x: Tensor) -> Tensor:
    return x.to(torch.float32).view(torch.int32)


def _placed(old: Any, new: Tensor) -> Any:
    """A whole value as its leaf is at rest."""
    if not isinstance(old, DTensor):
        return new
    sharding = sharding_of(old)
    shape = tuple(old.shape)
    grid = sharding.grid(shape)
    if grid is None:
        return old
    local = new
    for dim, runs in enumerate(grid):
        local = torch.cat([local.narrow(dim, a, b - a) for a, b in runs], dim)
    return sharding.to_dtensor(local.clone(), shape)


def _mesh_of(params: Tree) -> Mesh | None:
    shardings = (typeof(x).sharding for x in tree.leaves(params) if isinstance(x, Local | DTensor))
    return next((s.mesh for s in shardings if s is not None), None)


def _group(mesh: Mesh | None) -> Any:
    """The ranks over which amaxes are reduced: the mesh's."""
    if mesh is None:
        return None
    group = axis_group(mesh, abstract(mesh).names)
    if group.process_group is None and dist.is_initialized() and dist.get_world_size() > 1:
        mend = "Make a mesh of all ranks."
        rule = "reduces amaxes over a process group, and a mesh of one rank beside others has none."
        raise ConfigError(message(rule, mend=mend))
    return group.process_group


# ---------------------------------------------------------------------------------------------------------- functions
_KNOWN = (
    "Recipes are DelayedScaling, whose state is leaves, and Float8CurrentScaling, Float8BlockScaling and"
    " MXFP8BlockScaling, which have none."
)


@public
def functionalize(
    module: nn.Module, recipe: Any, units: UnitPatterns = (), *, names: NameTable | None = None
) -> TeModule:
    """Makes a pure function of its parameters and its fp8 state out of a module of Transformer Engine.

    Gradients come from `fs.te.value_and_grad`, and under a recipe without state from `fs.value_and_grad` and
    `fs.make_train_step` as well. `torch.func` cannot differentiate these modules.

    Args:
        module: of `Linear`, `LayerNormLinear`, `LayerNormMLP`, `TransformerLayer` and modules of torch, which has not
            run in fp8 yet; it is not changed. `TransformerLayer` has dropout of 0.1 unless it is made with
            `hidden_dropout=0, attention_dropout=0`; with dropout, calls need `random_key=`.
        recipe: of `transformer_engine.common.recipe`.
        units: as in `fs.functionalize`; by default all of the module is gathered at once.
        names: as in `fs.functionalize`.

    Raises:
        ConfigError: the package is not there; a recipe, or layers, with state that would be no leaf: all are listed; or
            as `fs.functionalize`.

    Example:
        >>> from importlib.util import find_spec
        >>> if torch.cuda.is_available() and find_spec("transformer_engine"):
        ...     from transformer_engine.common import recipe
        ...     from transformer_engine.pytorch import TransformerLayer
        ...     layer = TransformerLayer(64, 256, 4, hidden_dropout=0, attention_dropout=0)
        ...     net = fs.te.functionalize(layer, recipe.Float8CurrentScaling())
        ...     layout = fs.plan_layout(net, fs.make_mesh(dp=1), strategy=fs.zero(3), precision=fs.BF16)
    """
    package = _package()
    _refuse_recipe(recipe)
    layers = list[_Layer]()
    rows = list[str]()
    for path, layer in module.named_modules() if isinstance(module, nn.Module) else ():
        if not hasattr(layer, "fp8_meta"):
            continue
        kind = type(layer).__name__
        name = path or "the module"
        gemms = next((_GEMMS[c.__name__] for c in type(layer).__mro__ if c.__name__ in _GEMMS), None)
        rows += _objections(name, layer)
        if gemms is not None:
            layers.append(_Layer(path, gemms))
        elif kind != "DotProductAttention":  # in fp8 where the recipe says so alone, which is refused
            rows.append(f"{name} is {kind}: layers with fp8 state are {', '.join(_GEMMS)}")
    if rows:
        mend = "Use the layers and settings above; weights are cut by the layout, and gradients reduced by it."
        raise ConfigError(message("has layers whose state would be no leaf.", rows, mend))
    net = modules.made(TeModule, module, units, modules.ModuleOptions(names=names))
    net.begin(recipe, tuple(layers) if _is(recipe, "delayed") else (), package)
    return net


def _refuse_recipe(recipe: Any) -> None:
    """Refuses a recipe that keeps something between calls for which there is no leaf."""
    kind = type(recipe).__name__
    if _is(recipe, "nvfp4"):
        row = f"{kind} rounds with random numbers of each rank's own"
    elif _is(recipe, "custom") or not (_is(recipe, "delayed") or any(_is(recipe, name) for name in _STATELESS)):
        row = f"{kind} may keep anything"
    elif getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        row = f"{kind} has fp8_dpa or fp8_mha, under which attention has state"
    else:
        return
    raise ConfigError(message("got a recipe with state outside of leaves.", [row], _KNOWN))


def _objections(name: str, layer: Any) -> list[str]:
    """Settings of a layer under which something is kept, or sent, beside parameters and leaves."""
    rows: list[str] = []
    if (layer.fp8_meta or {}).get("scaling_fwd") is not None:
        rows.append(f"{name} has run in fp8 already: make it anew, and load its state dict")
    if getattr(layer, "primary_weights_in_fp8", False):
        rows.append(f"{name} has weights in fp8 alone: make it outside of quantized_model_init")
    if getattr(layer, "fuse_wgrad_accumulation", False):
        rows.append(f"{name} has fuse_wgrad_accumulation=True: it adds gradients to main_grad")
    if getattr(layer, "tp_size", 1) > 1:
        rows.append(f"{name} has tp_size={layer.tp_size}: it sends by itself")
    return rows


def value_and_grad(fn: Callable[..., Any], **options: Any) -> Callable[..., tuple[Any, Tree, Tree]]:
    """`fs.value_and_grad` that returns the next fp8 state as well.

    Args:
        fn: the loss function, which calls one `TeModule` with state, once.
        **options: of `fs.value_and_grad`.

    Returns:
        A function of the arguments of `fn`, and of `accumulate` and `donate`, that returns `(value, grads, state)`. The
        state is whole on every rank, for `TeModule.with_state`; {} where no module with state was called.

    Raises:
        TransformError: from the function: modules with state are called several times.

    Example:
        >>> loss = lambda params, x: fs.gather_unit(params)["w"].sum() * x
        >>> layout = fs.plan_layout({"w": torch.zeros(4)}, fs.make_mesh(dp=-1, device="cpu"))
        >>> params = fs.shard({"w": torch.ones(4)}, layout)
        >>> value, grads, state = fs.te.value_and_grad(loss)(params, torch.tensor(2.0))
        >>> float(value), state
        (8.0, {})
    """
    inner = losses.value_and_grad(fn, **options)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Tree, Tree]:
        call = _Call()
        with scoped(_calls, call):
            value, grads = inner(*args, **kwargs)
        return value, grads, {} if call.module is None else call.module.read_state()

    return run


@public
def scaled_linear(x: Tensor, weight: Tensor, format: Blocks, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` by a linear of Transformer Engine that rounds both sides to a format.

    Gradients are those of the package; a format says of them only what its recipe says: e5m2 for a scale of the whole
    tensor, else e4m3.

    Args:
        x: [..., in], on a GPU; in and the rows of x are what the package's kernels take.
        weight: [out, in], in the dtype of x.
        format: `TENSORWISE`, `E4M3_1x128` or `E4M3_128x128` (one recipe), or `MXFP8` of `fs.formats`.
        bias: floating point [out], or None for no bias.

    Returns:
        [..., out] in the dtype of x.

    Raises:
        ConfigError: the package is not there, or it has no recipe for the format.
        TransformError: under `torch.func`.

    Example:
        >>> from importlib.util import find_spec
        >>> if torch.cuda.is_available() and find_spec("transformer_engine"):
        ...     x, weight = torch.ones(32, 64, device="cuda"), torch.ones(32, 64, device="cuda")
        ...     y = fs.te.scaled_linear(x.bfloat16(), weight.bfloat16(), fs.formats.TENSORWISE)
    """
    package = _package()
    kinds = {
        formats.TENSORWISE: "Float8CurrentScaling",
        formats.E4M3_1x128: "Float8BlockScaling",
        formats.E4M3_128x128: "Float8BlockScaling",
        formats.MXFP8: "MXFP8BlockScaling",
    }
    if format not in kinds:
        rows = [f"{known} is {recipe}" for known, recipe in kinds.items()]
        raise ConfigError(message(f"has no recipe for {format}.", rows, "Use one of these formats."))
    if _functorch.in_functorch():
        mend = "Use fs.value_and_grad, or dequantize and multiply."
        raise TransformError(message(_NO_SETUP, mend=mend))
    layer = _linear(package, weight.shape[1], weight.shape[0], x.dtype, bias is not None)
    given = {"weight": weight} | ({} if bias is None else {"bias": bias})
    with _autocast(package, getattr(_recipes(), kinds[format])()):
        return torch.func.functional_call(layer, given, (x,))


@functools.lru_cache(64)
def _linear(package: ModuleType, inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> nn.Module:
    """A linear without weights."""
    return package.Linear(inputs, outputs, bias=bias, params_dtype=dtype, device="meta")
