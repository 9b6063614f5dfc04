"""Bring your own module: `functionalize` makes a pure function of its parameters out of an nn.Module.

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
from fsharding.interop.module.planning import ModuleOptions, ModulePlan, check_module, check_units, plan_of
from fsharding.interop.module.runtime import Engine, Run
from fsharding.interop.module.structure import Anatomy, NameTable, UnitPatterns, nested
from fsharding.interop.module.tensor_parallel import LayerRoles, Roles
from fsharding.mesh.device_mesh import Mesh
from fsharding.sharding.partition_spec import AxisRules
from fsharding.transforms import policies
from fsharding.transforms.policies import Policy, check_policy

__all__ = ["ModuleOptions", "PureModule", "functionalize", "made"]


class PureModule(Immutable, instead="net = fs.functionalize(module, ...), with other arguments"):
    """A module as a function of its parameters. It holds no parameters; `init` reads them from the module it is of.

    Attributes:
        anatomy: leaves and units, printable.
        names: tree of tuples of dim names, for `plan_layout`.
        frozen: paths of leaves whose parameters do not require gradients; `plan_layout` freezes them.
        roles: of its layers over `tp`, by path, and which layers cannot have theirs.
        sources: what the leaves are called in a state dict of the module, for `fs.foreign.load_weights` and `export`:
            `layers.up.weight` is `layers.{i}.up.weight`, or `Rows` where blocks have other numbers than 0, 1, 2.
        files: what they are called in files of Hugging Face, for `hf.load` and `hf.save`: the same, but for families
            whose experts are apart there. Both carry the module's persistent buffers, which are constants: who writes
            by these names writes them, too, and who reads refuses files that have other ones.
        config: the config of the module, with which `hf.load` and `hf.save` compare a `config.json`; None without one.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> net = fs.functionalize(module, units=["0", "2"])
        >>> layout = fs.plan_layout(net, fs.make_mesh(dp=-1, device="cpu"), strategy=fs.zero(3))
        >>> state = fs.init_state(net, fs.adamw(1e-3), fs.random.key(0), layout)
        >>> def loss(params, x):
        ...     return net(params, x).sum()
        >>> value, grads = fs.value_and_grad(loss)(state.params, torch.ones(1, 3))
        >>> value.shape
        torch.Size([])
    """

    anatomy: Anatomy
    names: Tree
    frozen: tuple[str, ...]
    roles: LayerRoles
    sources: ModuleNames
    files: ModuleNames
    config: ModuleConfig | None

    def __init__(self, plan: ModulePlan) -> None:
        """Made by `functionalize`."""
        anatomy = plan.anatomy
        sources = {leaf.path: leaf.pattern() for leaf in anatomy.leaves}
        order, self._structure = tree.flatten(nested({leaf.path: i for i, leaf in enumerate(anatomy.leaves)}))
        self._order: list[int] = order
        self._engine = Engine(plan)
        self._engine.open()
        buffers, of_state = self._engine.persistent()
        own = buffers, _aliases(plan.module), of_state
        files = {} if plan.family is None else plan.family.files
        # Blocks have the numbers there that they have in the module.
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
        """First values for `init_state`: the module's own; parameters on the meta device are drawn.

        Each rank takes its own slices. A parameter on the meta device is drawn whole, with all others of its submodule,
        and then cut; so the memory on top of the state is one submodule. After `init_state` the module may be moved to
        the meta device, which lets its memory go.

        Args:
            key: of what is drawn (int64[2]).

        Raises:
            ConfigError: the module was changed since it was functionalized; or, when values are taken, parameters on
                the meta device that nothing draws; all are listed.
        """
        return nested(self._engine.first_values(key))

    def init_buffers(self) -> dict[str, Tensor]:
        """First values of the buffers that the forward writes, as the module has them; `init_state` takes them.

        Example:
            >>> net = fs.functionalize(torch.nn.BatchNorm1d(2), ())
            >>> net.init_buffers()["running_var"]
            tensor([1., 1.])
        """
        own = self._engine.tensors()
        return {name: _compat.copied(own[name]).detach() for name in self._engine.plan.written}

    def constants(self) -> dict[str, Tensor]:
        """The buffers and other tensors of the module that are no parameters and stay as they are, by name.

        `init_state` and every collective call compare them between ranks, since no rank sends its own to another.

        Example:
            >>> net = fs.functionalize(torch.nn.BatchNorm1d(4).eval(), ())
            >>> sorted(net.constants())
            ['num_batches_tracked', 'running_mean', 'running_var']
        """
        return self._engine.constants()

    def check(self, mesh: Mesh, rules: AxisRules) -> None:
        """Raises where the module cannot be cut over the mesh; `plan_layout` calls it.

        Raises:
            ConfigError: the module was changed since it was functionalized, or a model axis over which some layer does
                not compute; all are listed. A module with `dummy_inputs`, as models of Hugging Face have them, is tried
                with the shapes that `tp` leaves a rank. Experts over `ep`: the module's forward takes all of them.
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
        """Calls the module with these parameters; on a rank, with its part of the batch.

        Args:
            params: `Local` nodes, as a loss function gets them, DTensors at rest, or whole plain tensors.
            random_key: of what the forward draws, such as dropout masks (int64[2]). The same key gives the same masks
                on one mesh, under every strategy and policy. Ranks along data axes draw masks of their own, and so do
                ranks of `tp` between a column and its row, so another mesh gives other ones.
            buffers: values of buffers of the module, by name: those that its forward writes, and any others. They stay
                as they are.

        Under `fs.evaluate` and `fs.models.generate` the module runs in eval mode.

        Returns:
            What the forward returns; with `buffers` a pair of that and the new buffers, without history.

        Raises:
            TransformError: the forward writes buffers that are not given, changes other tensors of the module, draws
                without a key, or uses weights of a unit outside of it; all are listed.
            TreeError: the parameters are another module's.
        """
        run = Run(self._engine, self._leaves(params), random_key, buffers)
        result = run.forward(args, kwargs)
        return result if buffers is None else (result, run.buffers)

    @property
    def running(self) -> nn.Module:
        """The copy of the module that is called, whose parameters are put in for each call."""
        return self._engine.module

    @public
    def state_dict(self, params: Tree, buffers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The parameters and persistent buffers under the names of the module, for its `load_state_dict`.

        Args:
            params: whole plain tensors, as `fs.unshard` gives them.
            buffers: `state.buffers`, for a module whose forward writes some.

        Returns:
            Every name of every parameter, also those of a module that stands in several places; blocks as views of
            their stacks; and the buffers that a state dict of the module has.

        Raises:
            ConfigError: the forward writes buffers that are not given; all are listed.
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
            mend = "Give the state's: net.state_dict(params, state.buffers)."
            raise ConfigError(message("needs the buffers that the forward writes.", missing, mend))
        return named | constants

    def _leaves(self, params: Tree) -> list[Any]:
        """The values at the leaves, in the order of the anatomy."""
        result: list[Any] = [None] * len(self._order)
        if {*tree.paths(params)}.isdisjoint(leaf.path for leaf in self.anatomy.leaves):
            mend = "Give the parameters first, as the loss function gets them: net(params, x)."
            raise refuse("parameters, then what the module takes", params, mend)
        for number, leaf in zip(self._order, tree.flatten_up_to(self._structure, params), strict=True):
            result[number] = leaf
        return result

    def __str__(self) -> str:
        return f"PureModule of {type(self._engine.plan.module).__name__}, {self.anatomy}"


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every name of a parameter that has several, by each of them."""
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
    """Makes a pure function of its parameters out of a module, which is not changed.

    Args:
        module: with real tensors, or on the meta device. Whether it is in train mode is taken over, but for
            `fs.evaluate`, which runs it in eval mode. Its tensors besides parameters are constants, but for buffers
            that its forward writes; a forward that changes another one is refused. State that it keeps in Python, such
            as a counter or a list, is not watched, and belongs to this copy: change modes, flags, attributes and
            buffers before this call. Layers of `nn.SyncBatchNorm` take the statistics of all data ranks.
        units: paths of the modules that are gathered when they are called, and let go after it. In `"layers.*"` the
            star stands for one part of a path, and the blocks that it finds are stacked: one leaf `[L, ...]` for each
            parameter. `("embed", "layers.*", ("norm", "head"))` has a unit of one module, a stack, and two modules
            that are gathered together. A module belongs to the first pattern that fits it. A leaf in no unit is
            gathered first and stays until the end. Units are sent for in the order in which the module defines them.
            By default the tables of `fsharding.interop.module.hf_tables`, for models of Hugging Face that stand there.
        names: dim names of leaves by pattern of the path, without that of a stack's first dim:
            `{"*.up.weight": ("mlp", "embed"), "*": None}`. By default the family's, or none; a leaf without
            names is cut along its first dim.
        roles: of layers over `tp`, by pattern of the path; see `fsharding.interop.module.tensor_parallel`. By default
            those of the family. Only plain layers can have one: a layer with a forward of its own, or with hooks,
            computes with full weights, so `tp` cannot cut it.
        reset: fills the parameters and buffers of a submodule that are on the meta device, in place; it gets one
            submodule at a time, without its children. By default its own `reset_parameters`, or the family's.
        policy: what blocks of stacks keep for backward.
        cast_inputs: cast floating inputs of the module and of its units to the compute dtype of the precision, as
            `cast_forward_inputs` of FSDP2's `MixedPrecisionPolicy` does. False leaves inputs as they are, for modules
            that cast by themselves, such as one that embeds float32 times.
        buffers: names of buffers that the forward writes, with `*` for any part: `"*.codebook"`. Those of torch's norms
            with running statistics and of its spectral norm are found without them. They are `state.buffers`, and each
            call takes and returns them.

    Returns:
        A function `net(params, *inputs)` that is a model for `plan_layout` and `init_state`.

    Raises:
        ArgumentError: `units` is neither text nor a list or tuple.
        ConfigError: no module, parameters that are tensor subclasses or share memory, patterns that find no units,
            roles for layers that are not there or cannot have them, buffers on the meta device, names that match no
            buffer, a policy that is none; or problems of several kinds.
        TreeError: blocks of one stack that are not alike.
        LayoutError: leaves that `names` misses, or names for leaves that are not there.
        TransformError: modules in train mode that checkpoint their own layers; all are listed.

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
    """`functionalize`, whose result is of a class that adds to `PureModule`."""
    check_module(module)
    check_units(units)
    check_policy(options.policy)
    if units is None and family_of(module) is None:
        children = [f"{name} is {type(child).__name__}" for name, child in module.named_children()]
        mend = "Say which modules are gathered together, such as units='layers.*'."
        raise ConfigError(message(f"does not know the units of {type(module).__name__}.", children, mend))
    return kind(plan_of(module, units, options))
