"""`functionalize`: convert an nn.Module to a pure function of its parameters.

Guarantee: outputs and gradients match the module on one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from fsharding.base import _compat, tree
from fsharding.base.errors import ConfigError, message
from fsharding.base.public import Immutable, public, refuse
from fsharding.base.tree import Tree
from fsharding.foreign.name_map import ModuleNames, Rows, aliases_of, written_constants
from fsharding.interop.hf.comparison import ModuleConfig, config_of_module
from fsharding.interop.hf.naming import renumbered
from fsharding.interop.module.hf_tables import family_of
from fsharding.interop.module.initializers import Reset
from fsharding.interop.module.layers import LayerRoles, Roles
from fsharding.interop.module.planning import ModuleOptions, ModulePlan, check_arguments, plan_of
from fsharding.interop.module.runtime import Engine, Run
from fsharding.interop.module.structure import Anatomy, NameTable, UnitPatterns, nested
from fsharding.mesh.device_mesh import Mesh
from fsharding.sharding.partition_spec import AxisRules
from fsharding.transforms import policies
from fsharding.transforms.policies import Policy, check_policy

__all__ = ["ModuleOptions", "PureModule", "functionalize", "made"]


class PureModule(Immutable, instead="net = fs.functionalize(module, ...), with other arguments"):
    """A module as a function of its parameters. It stores none; `init` reads them from the original module.

    Attributes:
        anatomy: Leaves and units; printable.
        names: Tree of tuples of dim names, for `plan_layout`.
        frozen: Paths of leaves that don't require gradients; `plan_layout` freezes them.
        roles: Roles of layers over `tp` by path, and the reasons why some layers can't have theirs.
        sources: State-dict name of each leaf, for `fs.foreign.load_weights` and `fs.foreign.export`:
            `layers.{i}.up.weight` for `layers.up.weight`, or `Rows` if the blocks aren't numbered 0, 1, 2. Includes the
            persistent buffers: exports write them, and loads refuse a file whose values differ.
        files: The same for Hugging Face files, for `hf.load` and `hf.save`. Differs from `sources` in families that
            store experts separately.
        config: The module's config, which `hf.load` and `hf.save` compare with `config.json`; None if it has none.

    Example:
        >>> net = fs.functionalize(torch.nn.Linear(3, 2), ())
        >>> sorted(net.sources)
        ['bias', 'weight']
    """

    anatomy: Anatomy
    names: Tree
    frozen: tuple[str, ...]
    roles: LayerRoles
    sources: ModuleNames
    files: ModuleNames
    config: ModuleConfig | None

    def __init__(self, plan: ModulePlan) -> None:
        """Open the engine of a plan; `functionalize` calls this."""
        anatomy = plan.anatomy
        sources = {leaf.path: leaf.pattern() for leaf in anatomy.leaves}
        self._paths, self._structure = tree.flatten(nested({path: path for path in sources}))
        self._engine = Engine(plan)
        self._engine.open()
        buffers, of_state = self._engine.persistent()
        own = buffers, _aliases(plan.module), of_state
        files = {} if plan.family is None else plan.family.files
        # A family's table numbers blocks 0, 1, 2; files number them as the module does.
        numbered = {
            path: renumbered(files[path], name.keys) if isinstance(name, Rows) else files[path]
            for path, name in sources.items()
            if path in files
        }
        vars(self).update(
            anatomy=anatomy,
            names=nested({leaf.path: leaf.names for leaf in anatomy.leaves}),
            frozen=tuple(x.path for x in anatomy.leaves if x.dtype.is_floating_point and not x.trainable),
            roles=plan.roles,
            sources=ModuleNames(sources, *own),
            files=ModuleNames(sources | numbered, *own),
            config=config_of_module(plan.module),
        )

    @public
    def init(self, key: Tensor) -> Tree:
        """Return the initial parameters, for `init_state`: the module's values, or `reset`'s on the meta device.

        Each rank stores only its slices. Meta parameters are initialized one submodule at a time, unsharded, so the
        peak memory beyond the state is one submodule. To free the original after `init_state`, move it to the meta
        device.

        Args:
            key: Random key of the initialization (int64[2]).

        Returns:
            A tree of lazy leaves.

        Raises:
            ConfigError: the module was changed since it was functionalized; or, once values are computed, meta
                parameters that no `reset` fills.
        """
        return nested(self._engine.first_values(key))

    def init_buffers(self) -> dict[str, Tensor]:
        """Copy the module's values of the buffers that the forward writes; `init_state` calls this.

        Returns:
            A tensor for each buffer name.

        Example:
            >>> net = fs.functionalize(torch.nn.BatchNorm1d(2), ())
            >>> net.init_buffers()["running_var"]
            tensor([1., 1.])
        """
        own = self._engine.tensors()
        return {name: _compat.copied(own[name]).detach() for name in self._engine.plan.written}

    def constants(self) -> dict[str, Tensor]:
        """Return the module's constants: its tensors that are neither parameters nor written by the forward.

        They must be equal on all ranks, which `init_state` and every collective call check.

        Returns:
            A tensor for each name.

        Example:
            >>> net = fs.functionalize(torch.nn.BatchNorm1d(4).eval(), ())
            >>> sorted(net.constants())
            ['num_batches_tracked', 'running_mean', 'running_var']
        """
        return self._engine.constants()

    def check(self, mesh: Mesh, rules: AxisRules) -> None:
        """Check that the module can be sharded over a mesh; `plan_layout` calls this.

        A module with `dummy_inputs`, such as a Hugging Face model, is run on the meta device with the shapes of one
        `tp` rank.

        Args:
            mesh: Mesh of the layout.
            rules: Mesh axes by dim name.

        Raises:
            ConfigError: the module was changed since it was functionalized, layers that can't be sharded over a model
                axis, or experts over `ep` (the forward computes all experts on every rank).
        """
        self._engine.original.check()
        self._engine.plan.check(mesh, rules)

    @public
    @_compat.outside_of_graphs
    def __call__(
        self,
        params: Tree,
        *args: Any,
        random_key: Tensor | None = None,
        buffers: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forward with the given parameters, on this rank's part of the batch.

        `fs.evaluate` and `fs.models.generate` run the module in eval mode.

        Args:
            params: `Local` nodes (as inside a loss function), DTensors at rest, or unsharded tensors.
            *args: Positional inputs of the forward.
            random_key: Key of random operations in the forward, such as dropout (int64[2]). On one mesh the masks
                depend on the key alone, not on the strategy or policy; they differ between meshes, because data ranks
                and, from a column to its row, `tp` ranks draw different masks.
            buffers: Buffer values by name: all buffers that the forward writes, and any others. Not modified.
            **kwargs: Keyword inputs of the forward.

        Returns:
            The output of the forward; with `buffers`, a pair of the output and the new buffers, detached.

        Raises:
            TransformError: the forward writes buffers that weren't passed, changes other tensors of the module, uses
                random numbers without a key, or uses weights of a unit outside the unit.
            TreeError: parameters of a different module.
        """
        run = Run(self._engine, self._leaves(params), random_key, buffers)
        result = run.forward(args, kwargs)
        return result if buffers is None else (result, run.buffers)

    @property
    def running(self) -> nn.Module:
        """The module's copy that runs; each call substitutes its parameters."""
        return self._engine.module

    @public
    def state_dict(self, params: Tree, buffers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Convert parameters to a state dict for the module's `load_state_dict`.

        Args:
            params: Unsharded tensors, as `fs.unshard` returns them.
            buffers: `state.buffers`, if the forward writes buffers.

        Returns:
            Parameters and persistent buffers by name. A shared parameter is under all of its names; blocks are views of
            their stacks.

        Raises:
            ConfigError: the forward writes buffers that weren't passed.
        """
        leaves = self._leaves(params)
        weights = (weight for unit in self.anatomy.units for weight in unit.weights)
        named = {
            name: leaves[w.leaf] if w.row is None else leaves[w.leaf][w.row]
            for w in weights
            for name in aliases_of(self.sources, w.name)
        }
        constants, missing = written_constants(self.sources, buffers or {})
        if missing:
            mend = "Pass the state's buffers: net.state_dict(params, state.buffers)."
            raise ConfigError(message("needs the buffers that the forward writes.", missing, mend))
        return named | constants

    def _leaves(self, params: Tree) -> dict[str, Any]:
        """Return the leaves by path."""
        # A tree without a single known path is a swapped argument; one that differs in a few fails in `flatten_up_to`.
        if {*tree.paths(params)}.isdisjoint(self._paths):
            mend = "Pass the parameters first, then the module's inputs: net(params, x)."
            raise refuse("parameters, then the module's inputs", params, mend)
        return dict(zip(self._paths, tree.flatten_up_to(self._structure, params), strict=True))

    def __str__(self) -> str:
        return f"PureModule of {type(self._engine.plan.module).__name__}, {self.anatomy}"


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map each name of a parameter that has several to all of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(every) for every in names.values() if len(every) > 1 for name in every}


P = TypeVar("P", bound=PureModule)


@public
def functionalize(
    module: nn.Module,
    units: UnitPatterns | None = None,
    *,
    names: NameTable | None = None,
    roles: Roles | None = None,
    reset: Reset | None = None,
    policy: Policy = policies.save_except_gathered,
    cast_inputs: bool = True,
    buffers: str | Sequence[str] = (),
) -> PureModule:
    """Convert an `nn.Module` to a pure function of its parameters; the module isn't changed.

    The function runs a copy: set mode (train or eval), flags, attributes and buffers first. Python state of the
    forward, such as a counter, stays in the copy and isn't checked. `nn.SyncBatchNorm` uses statistics of all data
    ranks.

    Args:
        module: Module with real or meta tensors, in train or eval mode. Its tensors other than parameters are
            constants, except the buffers that the forward writes.
        units: Paths of the modules to gather when they are called and free afterward. `*` matches one part of a path:
            `"layers.*"` stacks the blocks, with one leaf `[L, ...]` per parameter. In
            `("embed", "layers.*", ("norm", "head"))`, `norm` and `head` are gathered together. The first pattern that
            matches a module counts. Parameters in no unit are gathered first and stay until backward ends. Units are
            prefetched in the order of their definition. Default: the table for the module's Hugging Face family.
        names: Dim names by pattern of a leaf's path; omit the layer dim of a stack:
            `{"*.up.weight": ("mlp", "embed"), "*": None}`. Default: the family's, or None, which shards the first dim.
        roles: Roles of layers over `tp` by pattern of their path: "column", "row", "vocab", "logits" or "inside".
            Default: the family's. Layers with a custom forward or with hooks can't have one and use full weights.
        reset: Function that fills the meta parameters and buffers of one submodule in place, without its children.
            Default: the family's, or the submodule's `reset_parameters`.
        policy: Remat policy of stacked blocks.
        cast_inputs: Whether to cast floating inputs of the module and its units to the compute dtype, as
            `cast_forward_inputs` of FSDP2 does. Pass False if the module casts by itself.
        buffers: Names or patterns of buffers that the forward writes, such as `"*.codebook"`; they become
            `state.buffers`. Running statistics of torch's norms and vectors of its spectral norm are always included.

    Returns:
        A function `net(params, *inputs)`, which is also a model for `plan_layout` and `init_state`.

    Raises:
        ArgumentError: `units` that are neither a path nor a list or tuple of paths.
        ConfigError: an argument that isn't a module, parameters that are tensor subclasses or views, patterns
            that match no unit, layer or buffer, roles that a layer can't have, meta buffers, an unknown policy, or
            several kinds of problems.
        TreeError: blocks of one stack that differ.
        LayoutError: leaves without an entry in `names`, or entries that match no leaf.
        TransformError: modules in train mode that use activation checkpointing themselves.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> net = fs.functionalize(module, units=["0", "2"])
        >>> layout = fs.plan_layout(net, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> state = fs.init_state(net, fs.adamw(1e-3), fs.random.key(0), layout)
        >>> def loss(params, x):
        ...     return net(params, x).square().mean()
        >>> value, grads = fs.value_and_grad(loss)(state.params, torch.ones(1, 3))
        >>> value.shape
        torch.Size([])
    """
    return made(PureModule, module, units, ModuleOptions(names, roles, reset, policy, cast_inputs, buffers))


def made(kind: type[P], module: nn.Module, units: UnitPatterns | None, options: ModuleOptions) -> P:
    """Run `functionalize` for a subclass of `PureModule`."""
    check_arguments(module, units)
    check_policy(options.policy)
    if units is None and family_of(module) is None:
        children = [f"{name} is {type(child).__name__}" for name, child in module.named_children()]
        mend = "Pass the paths of modules to gather together, such as units='layers.*'."
        raise ConfigError(message(f"has no default units for {type(module).__name__}.", children, mend))
    return kind(plan_of(module, units, options))
