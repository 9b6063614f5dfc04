"""JAX-style functional sharding over torch: pure functions over sharded parameter pytrees."""

from importlib import import_module
from importlib.util import find_spec
from inspect import isroutine
from types import ModuleType
from typing import TYPE_CHECKING

from fsharding.base.registry import find, names_of, register
from fsharding.base.version import own_version

__version__ = own_version()
register("api", "fs", "fsharding.api")
# In the order in which a group of gloo tries them.
register("transport", "shared_memory", "fsharding.contrib.shared_memory.transport:SharedMemory")
register("transport", "pairwise", "fsharding.contrib.pairwise:Pairwise")
# In the order in which errors list them.
register("tier", "device", "fsharding.comm.tier:DEVICE")
register("tier", "host", "fsharding.comm.tier:HOST")
register("tier", "disk", "fsharding.contrib.disk:DISK")
# Names of `fs` that are imported when used; a program that trains a custom function needs none of them.
for _name in ("checkpoint", "debug", "foreign", "models"):
    register("later", _name, f"fsharding.{_name}")
register("later", "data", "fsharding.apps.data")
register("later", "hf", "fsharding.interop.hf")
register("later", "megatron", "fsharding.contrib.megatron")
register("later", "te", "fsharding.contrib.te")
register("later", "functionalize", "fsharding.interop.module.functionalize:functionalize")
register("later", "model_from_module", "fsharding.interop.module.model_from_module:model_from_module")
register("later", "run_ranks", "fsharding.testing:run_ranks")
# Names of `fs.optim`; those that end with "State" are of the states that a checkpoint may name.
for _module, _names in {
    "adafactor": ("AdafactorState", "adafactor"),
    "from_torch": ("TorchState", "from_torch"),
    "wrappers": ("EmaState", "LookaheadState", "NoiseState", "add_noise", "annealed", "ema", "ema_of", "lookahead"),
}.items():
    for _name in _names:
        register("optimizer", _name, f"fsharding.contrib.optim.{_module}:{_name}")

if TYPE_CHECKING:
    from fsharding import checkpoint as checkpoint
    from fsharding import debug as debug
    from fsharding import foreign as foreign
    from fsharding import models as models
    from fsharding.api import *  # noqa: F403
    from fsharding.api import __all__ as __all__
    from fsharding.apps import data as data
    from fsharding.contrib import megatron as megatron
    from fsharding.contrib import te as te
    from fsharding.interop import hf as hf
    from fsharding.interop.module.functionalize import functionalize as functionalize
    from fsharding.interop.module.model_from_module import model_from_module as model_from_module
    from fsharding.testing import run_ranks as run_ranks

_SHARD = "Plan it: layout = fs.plan_layout(model, mesh, strategy={}), then fs.init_state(model, opt, key, layout)."
_LOSS_GRAD = "Call fs.value_and_grad(loss_fn)(params, batch), which returns (value, grads)."
_COLLECTIVE = "Inside a loss function call {}, by the name of an axis."
_CLIP = "Write fs.optim.chain(fs.optim.clip_by_global_norm(1.0), opt)."
_ELSEWHERE = {
    **dict.fromkeys(("grad", "grad_and_value", "jacrev"), _LOSS_GRAD),
    "jit": "Nothing has to be traced: call the function. torch.compile(block) compiles a block.",
    "compile": "Use torch.compile on a block, or on a loss function.",
    **dict.fromkeys(("pmap", "vmap"), "Use torch.func.vmap inside fs.shard_map(fn), which gives each rank its part."),
    "Mesh": "Make one: fs.make_mesh(dp=-1).",
    **dict.fromkeys(("DeviceMesh", "init_device_mesh", "init_process_group"), "Call fs.make_mesh(dp=-1)."),
    "PartitionSpec": "Write fs.P.",
    "Parts": "Write fs.hf.families.Parts(embed, block, head).",
    **dict.fromkeys(("fully_shard", "fsdp", "FSDP", "FullyShardedDataParallel"), _SHARD.format("fs.zero(3)")),
    **dict.fromkeys(("DDP", "DistributedDataParallel"), _SHARD.format("fs.zero(0)")),
    **{f"zero{level}": f"Write fs.zero({level})." for level in range(4)},
    "device_put": "Call fs.shard(tree, layout).",
    "with_sharding_constraint": "Call fs.redistribute(tree, shardings).",
    **dict.fromkeys(("save", "load", "checkpoint"), "Call fs.checkpoint.save(path, state) or load(path, layout)."),
    **dict.fromkeys(("adam", "Adam", "AdamW", "optim"), "Write fs.adamw(1e-3)."),
    "SGD": "Write fs.sgd(0.1).",
    **dict.fromkeys(("clip_grad_norm_", "clip_grad_norm"), _CLIP),
    "no_sync": "Give make_train_step(..., microbatches=n), which accumulates gradients.",
    **dict.fromkeys(("tree_map", "map", "tree"), "Call fs.tree.map."),
    **dict.fromkeys(("PRNGKey", "key", "manual_seed", "random"), "Make a key: fs.random.key(0)."),
    **dict.fromkeys(("psum", "all_reduce"), _COLLECTIVE.format("fs.ops.psum(x, axis)")),
    "all_gather": _COLLECTIVE.format("fs.ops.all_gather(x, axis, dim=0)"),
    "reduce_scatter": _COLLECTIVE.format("fs.ops.reduce_scatter(x, axis, dim=0)"),
}


class _Namespace(ModuleType):
    """A module of `fs`, such as `fs.optim`; calling it raises an error with the function to call."""

    path: str

    def __call__(self, *args: object, **kwargs: object) -> None:
        from fsharding.base.errors import ArgumentError, listed, report  # lazy: it loads torch

        functions = [f"{self.path}.{own}" for own in self.__all__ if isroutine(getattr(self, own))]
        mend = _ELSEWHERE.get(self.path.removeprefix("fs.")) or f"Call what is in it: {listed(functions)}."
        raise ArgumentError(report(f"{self.path} is a module, not a function.", mend=mend))

    def __reduce__(self) -> tuple[object, ...]:
        return import_module, (self.__name__,)  # as cloudpickle sends a module


def _namespace(path: str, found: object) -> object:
    """Refuse calls of what is found, if it is a module, and of the modules in it."""
    if type(found) is ModuleType:
        found.__class__ = _Namespace
        vars(found)["path"] = path
        for name, inner in [*vars(found).items()]:
            if isinstance(inner, ModuleType) and inner.__name__ == f"{found.__name__}.{name}":
                _namespace(f"{path}.{name}", inner)
    return found


def _in_namespaces(api: ModuleType) -> dict[str, str]:
    """Name the namespaces that have a name, such as `fs.optim.chain`, by that name."""
    members = {**vars(api), **{name: find("later", name) for name in names_of("later")}}
    names = [*api.__all__, *names_of("later")]
    spaces = {f"fs.{name}": members[name] for name in names if isinstance(members[name], ModuleType)}
    spaces["fs.optim.schedules"] = api.optim.schedules
    found: dict[str, list[str]] = {}
    for path, space in spaces.items():
        for name in space.__all__:
            found.setdefault(name, []).append(f"{path}.{name}")
    return {name: f"Write {' or '.join(paths)}." for name, paths in found.items()}


if not TYPE_CHECKING:  # a type checker would take every name for one that is there

    def __getattr__(name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        if name in names_of("later"):
            return globals().setdefault(name, _namespace(f"fs.{name}", find("later", name)))
        # Modules alone: `from fsharding import optim` needs one while the names of the api are being defined.
        if find_spec(f"{__name__}.{name}") is not None:
            return _namespace(f"fs.{name}", import_module(f"{__name__}.{name}"))  # lazy: the command line waits for it
        api = import_module(f"{__name__}.api")  # lazy: as above
        public = sorted([*api.__all__, *names_of("later")])
        globals().update({own: _namespace(f"fs.{own}", getattr(api, own)) for own in api.__all__}, __all__=public)
        if name not in globals():
            from fsharding.base.public import missing_name  # lazy: as above

            raise missing_name("fs", name, public, _in_namespaces(api) | _ELSEWHERE)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module(f"{__name__}.api").__all__, *names_of("later")})  # lazy: as above
