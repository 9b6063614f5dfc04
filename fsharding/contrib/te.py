"""Modules of Transformer Engine as pure functions of parameters and fp8 state: nothing kept in a module ever counts."""

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
"""The key of the fp8 state in a `TeModule`'s parameter tree."""

_NO_SETUP = "cannot be differentiated by torch.func: autograd Functions of Transformer Engine have no setup_context."
_GEMMS = {"Linear": 1, "LayerNormLinear": 1, "LayerNormMLP": 2}
"""Number of matmuls per layer; each has three scaled tensors in forward and two in backward."""
_SIDES = {"scaling_fwd": 3, "scaling_bwd": 2}
_STATELESS = ("float8_current_scaling", "mxfp8", "float8_block_scaling")
"""Predicate methods of recipes that keep nothing between calls."""


class _Layer(NamedTuple):
    """A layer with fp8 state: its path, and its number of matmuls."""

    path: str
    gemms: int


# -------------------------------------------------------------------------------------------------------- the package
def _package() -> ModuleType:
    """Import `transformer_engine.pytorch`."""
    try:
        return importlib.import_module("transformer_engine.pytorch")  # lazy: an extra that needs CUDA
    except (ImportError, OSError, RuntimeError) as error:
        mend = "On a machine with a CUDA toolchain: pip install 'fsharding[te]'."
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(message("needs Transformer Engine.", [why], mend)) from error


def _recipes() -> ModuleType:
    return importlib.import_module("transformer_engine.common.recipe")  # lazy: as above


def _autocast(package: ModuleType, recipe: Any, group: Any = None) -> Any:
    """Enter the package's low-precision context, by its name in this version."""
    if hasattr(package, "autocast"):
        return package.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)
    return package.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=group)


def _is(recipe: Any, kind: str) -> bool:
    """Return whether a recipe is of a kind; older releases lack the methods of newer kinds."""
    return bool(getattr(recipe, kind, bool)())


# --------------------------------------------------------------------------------------------------------- the module
@dataclass
class _Call:
    """The module with state that was called in one `value_and_grad`."""

    module: TeModule | None = None


_calls: ContextVar[_Call | None] = ContextVar("fsharding_te_calls", default=None)


class TeModule(PureModule):
    """A Transformer Engine module under a recipe, as a function of its parameters and its fp8 state.

    Use it like a `PureModule`. Under a recipe with state its tree has the entry `te.STATE`: `scale` and `amax_history`
    of each layer and direction. They are int32 with the bits of float32, so that no `Precision` casts them.

    Attributes:
        recipe: Recipe of the package.
        layers: Paths of the layers with state; () under a recipe without state.

    Example:
        >>> fs.te.STATE, fs.te.TeModule.__name__  # the state of a module is net.init(key)[fs.te.STATE]
        ('fp8_state', 'TeModule')
    """

    recipe: Any
    layers: tuple[_Layer, ...]

    def begin(self, recipe: Any, layers: tuple[_Layer, ...], package: ModuleType) -> None:
        """Set the recipe and the layers; called by `functionalize`."""
        vars(self).update(recipe=recipe, layers=layers)
        self._te = package
        self._looked = False
        if layers:
            names = {**self.names, STATE: tree.map(lambda x: (None,) * x.ndim, self._first("meta"))}
            vars(self).update(names=names)

    def _first(self, device: str = "cpu") -> Tree:
        """Make the state of a module that has never been called."""
        values: dict[str, Tensor] = {}
        for layer in self.layers:
            for side, tensors in _SIDES.items():
                path = ".".join(filter(None, (layer.path, side)))
                count = tensors * layer.gemms
                values[f"{path}.scale"] = _bits(torch.ones(count, device=device))
                values[f"{path}.amax_history"] = _bits(torch.zeros(self.recipe.amax_history_len, count, device=device))
        return nested(values)

    def init(self, key: Tensor) -> Tree:
        """Make first values, as `PureModule.init`; fp8 scales are 1 and amaxes 0."""
        params = super().init(key)
        return {**params, STATE: self._first()} if self.layers else params

    def check(self, mesh: Mesh, rules: AxisRules) -> None:
        """Refuse a mesh over which the module can't be sharded, or ranks would have different fp8 states."""
        super().check(mesh, rules)
        if self.layers and abstract(mesh).size > 1 and not self.recipe.reduce_amax:
            mend = "Make the recipe with reduce_amax=True: the state is one value for all ranks."
            raise ConfigError(message(f"got a recipe of one rank on the mesh {abstract(mesh)}.", mend=mend))

    @public
    @_compat.outside_of_graphs
    def __call__(self, params: Tree, *args: Any, random_key: Tensor | None = None, **kwargs: Any) -> Any:
        """Call the module with parameters and fp8 state under its recipe.

        Args:
            params: Parameters as for `PureModule`, with the state under `te.STATE`.
            *args: Arguments of the module's forward.
            random_key: Random key of dropout, as for `PureModule`.
            **kwargs: Keyword arguments of the module's forward.

        Returns:
            The result of the module's forward.

        Raises:
            TransformError: The call is under `torch.func`, caches weights over microbatches, or takes gradients under
                a recipe with state outside of `fs.te.value_and_grad`, where the next state would be lost.
        """
        if _functorch.in_functorch():
            mend = "Use fs.te.value_and_grad, or fs.value_and_grad with a recipe without state."
            raise TransformError(message(_NO_SETUP, mend=mend))
        if kwargs.get("is_first_microbatch") is not None:
            rule = "keeps no weights in fp8 between calls."
            raise TransformError(message(rule, mend="Leave is_first_microbatch out."))
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
        """Return parameters with a different fp8 state, sharded as the current one.

        Args:
            params: Parameters with a state under `te.STATE`, between steps; not changed.
            state: Full state from `fs.te.value_and_grad`; {} keeps the current one.
        """
        if not state:
            return params
        return {**params, STATE: tree.map(_placed, params[STATE], state)}

    def _note(self) -> None:
        """Register the call at the enclosing `value_and_grad`, which reads the state; refuse to lose it."""
        call = _calls.get()
        rows = [f"recipe {type(self.recipe).__name__} changes {len(self.layers)} layers' amaxes"]
        if call is None:
            if torch.is_grad_enabled():
                rule = "has fp8 state that a call changes, which would be lost."
                mend = "Use fs.te.value_and_grad, which returns the next state; evaluate under torch.no_grad()."
                raise TransformError(message(rule, rows, mend))
            return
        if call.module is not None:
            rule = "can follow the fp8 state of one call of one module in a loss function."
            mend = "Put the modules into one nn.Module, and call it once for each microbatch."
            raise TransformError(report(f"{_GRADS} {rule}", rows, mend))
        call.module = self

    def _layer(self, path: str) -> Any:
        """Return a layer of the running copy, untyped: it has attributes of the package."""
        return self.running.get_submodule(path)

    def _metas(self) -> Generator[tuple[str, Any]]:
        """Yield the package's state of each layer and direction, by path."""
        for layer in self.layers:
            meta: Any = self._layer(layer.path).fp8_meta
            yield from ((".".join(filter(None, (layer.path, side))), meta[side]) for side in _SIDES)

    @torch.no_grad()
    def _write(self, values: Tree) -> None:
        """Copy a state into the module, in place: the package keeps references to the tensors."""
        for layer in self.layers:
            self._layer(layer.path).init_fp8_metadata(num_gemms=layer.gemms)
        named = tree.named_leaves(values)
        for path, meta in self._metas():
            for name in ("scale", "amax_history"):
                getattr(meta, name).copy_(named[f"{path}.{name}"].view(torch.float32))

    @torch.no_grad()
    def read_state(self) -> Tree:
        """Return the full state after the last forward and backward, for `fs.te.value_and_grad`."""
        values = {
            f"{path}.{name}": _bits(getattr(meta, name).clone())
            for path, meta in self._metas()
            for name in ("scale", "amax_history")
        }
        return nested(values)

    def _refuse_hidden(self) -> None:
        """Refuse a recipe that turned out to keep tensors in the module, outside of leaves."""
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
    """Shard a full value like the leaf that it replaces."""
    if not isinstance(old, DTensor):
        return new
    sharding, local = sharding_of(old), new
    grid = sharding.grid(tuple(old.shape))
    if grid is None:
        return old
    for dim, runs in enumerate(grid):
        local = torch.cat([local.narrow(dim, a, b - a) for a, b in runs], dim)
    return sharding.to_dtensor(local.clone(), tuple(old.shape))


def _mesh_of(params: Tree) -> Mesh | None:
    shardings = (typeof(x).sharding for x in tree.leaves(params) if isinstance(x, Local | DTensor))
    return next((s.mesh for s in shardings if s is not None), None)


def _group(mesh: Mesh | None) -> Any:
    """Return the process group over which amaxes are reduced: all ranks of the mesh."""
    if mesh is None:
        return None
    group = axis_group(mesh, abstract(mesh).names)
    if group.process_group is None and dist.is_initialized() and dist.get_world_size() > 1:
        rule = "reduces amaxes over a process group, and a mesh of one rank among several has none."
        raise ConfigError(message(rule, mend="Make a mesh of all ranks."))
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
    """Convert a Transformer Engine module to a pure function of its parameters and its fp8 state.

    Differentiate with `fs.te.value_and_grad`; under a recipe without state `fs.value_and_grad` and `fs.make_train_step`
    work, too. `torch.func` can't differentiate these modules.

    Args:
        module: Module of `Linear`, `LayerNormLinear`, `LayerNormMLP`, `TransformerLayer` and torch modules that hasn't
            run in fp8 yet; it isn't changed. `TransformerLayer` has dropout 0.1 by default; with dropout, calls need
            `random_key=`.
        recipe: Recipe of `transformer_engine.common.recipe`.
        units: Units to gather, as in `fs.functionalize`. Default: the full module as one unit.
        names: Dim names, as in `fs.functionalize`.

    Returns:
        A `TeModule`.

    Raises:
        ConfigError: Transformer Engine isn't installed, the recipe or layers keep state outside of leaves (all are
            listed), or any reason of `fs.functionalize`.

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
        elif kind != "DotProductAttention":  # uses fp8 only under recipes that `_refuse_recipe` refuses
            rows.append(f"{name} is {kind}: layers with fp8 state are {', '.join(_GEMMS)}")
    if rows:
        mend = "Use the layers and settings above; the layout shards the weights and reduces the gradients."
        raise ConfigError(message("has layers whose state isn't a leaf.", rows, mend))
    net = modules.made(TeModule, module, units, modules.ModuleOptions(names=names))
    net.begin(recipe, tuple(layers) if _is(recipe, "delayed") else (), package)
    return net


def _refuse_recipe(recipe: Any) -> None:
    """Refuse a recipe that keeps something between calls outside of leaves."""
    kind = type(recipe).__name__
    if _is(recipe, "nvfp4"):
        row = f"{kind} rounds with different random numbers on each rank"
    elif _is(recipe, "custom") or not (_is(recipe, "delayed") or any(_is(recipe, name) for name in _STATELESS)):
        row = f"{kind} may keep anything"
    elif getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        row = f"{kind} has fp8_dpa or fp8_mha, under which attention has state"
    else:
        return
    raise ConfigError(message("got a recipe with state outside of leaves.", [row], _KNOWN))


def _objections(name: str, layer: Any) -> list[str]:
    """List settings of a layer that keep or send anything besides parameters and leaves."""
    rows: list[str] = []
    if (layer.fp8_meta or {}).get("scaling_fwd") is not None:
        rows.append(f"{name} has run in fp8 already: make a new one, and load its state dict")
    if getattr(layer, "primary_weights_in_fp8", False):
        rows.append(f"{name} has weights in fp8 alone: make it outside of quantized_model_init")
    if getattr(layer, "fuse_wgrad_accumulation", False):
        rows.append(f"{name} has fuse_wgrad_accumulation=True: it adds gradients to main_grad")
    if getattr(layer, "tp_size", 1) > 1:
        rows.append(f"{name} has tp_size={layer.tp_size}: it sends by itself")
    return rows


def value_and_grad(fn: Callable[..., Any], **options: Any) -> Callable[..., tuple[Any, Tree, Tree]]:
    """Differentiate as `fs.value_and_grad`, and return the next fp8 state as well.

    Args:
        fn: Loss function that calls one `TeModule` with state, once.
        **options: Options of `fs.value_and_grad`.

    Returns:
        A function of the arguments of `fn`, `accumulate` and `donate` that returns `(value, grads, state)`: the full
        state on every rank, for `TeModule.with_state`; {} if no module with state was called.

    Raises:
        TransformError: The function calls modules with state several times.

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
    """Compute `x @ weight.T + bias` by a Transformer Engine linear that quantizes both sides.

    Gradients are quantized by the recipe of the format: to e5m2 for `TENSORWISE`, else to e4m3.

    Args:
        x: Activations [..., in] on a GPU; `in` and the number of rows must suit the package's kernels.
        weight: Weight [out, in] in the dtype of x.
        format: `TENSORWISE`, `E4M3_1x128` or `E4M3_128x128` (one recipe), or `MXFP8` of `fs.formats`.
        bias: Floating point [out], or None.

    Returns:
        The product [..., out] in the dtype of x.

    Raises:
        ConfigError: Transformer Engine isn't installed, or has no recipe for the format.
        TransformError: The call is under `torch.func`.

    Example:
        >>> from importlib.util import find_spec
        >>> if torch.cuda.is_available() and find_spec("transformer_engine"):
        ...     x, weight = torch.ones(32, 64, device="cuda"), torch.ones(32, 64, device="cuda")
        ...     y = fs.te.scaled_linear(x.bfloat16(), weight.bfloat16(), fs.formats.TENSORWISE)
    """
    package = _package()
    blocks = dict.fromkeys((formats.E4M3_1x128, formats.E4M3_128x128), "Float8BlockScaling")
    kinds = {formats.TENSORWISE: "Float8CurrentScaling", **blocks, formats.MXFP8: "MXFP8BlockScaling"}
    if format not in kinds:
        rows = [f"{known} is {recipe}" for known, recipe in kinds.items()]
        raise ConfigError(message(f"has no recipe for {format}.", rows, "Use one of these formats."))
    if _functorch.in_functorch():
        raise TransformError(message(_NO_SETUP, mend="Use fs.value_and_grad, or dequantize and multiply."))
    layer = _linear(package, weight.shape[1], weight.shape[0], x.dtype, bias is not None)
    given = {"weight": weight} | ({} if bias is None else {"bias": bias})
    with _autocast(package, getattr(_recipes(), kinds[format])()):
        return torch.func.functional_call(layer, given, (x,))


@functools.lru_cache(64)
def _linear(package: ModuleType, inputs: int, outputs: int, dtype: torch.dtype, bias: bool) -> nn.Module:
    """Make a linear without weights, to be called with given ones."""
    return package.Linear(inputs, outputs, bias=bias, params_dtype=dtype, device="meta")
