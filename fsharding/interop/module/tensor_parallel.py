"""Tensor parallelism for modules of plain `nn.Linear` and `nn.Embedding`: which forwards are replaced, and by what.

Guarantee: outputs and gradients match one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsharding import ops
from fsharding.base import _compat
from fsharding.base.errors import ConfigError, report
from fsharding.interop.module.initializers import random_state, reseed, seeded, set_random_state
from fsharding.interop.module.layers import LayerRoles, Role
from fsharding.interop.module.structure import Anatomy
from fsharding.mesh.abstract_mesh import DATA_AXES
from fsharding.mesh.device_mesh import Mesh, abstract, axis_index, axis_size
from fsharding.ops.embedding import look_up
from fsharding.sharding import boxes
from fsharding.sharding.leaf_plan import EXPERT, type_text
from fsharding.sharding.partition_spec import AxisRules, rule_name

__all__ = ["Bare", "Entrances", "check_axes", "install"]

_CUT: dict[str, dict[str, int]] = {
    "column": {"weight": 0, "bias": 0},
    "row": {"weight": 1},
    "inside": {},
    "vocab": {"weight": 0},
    "logits": {"weight": 0, "bias": 0},
}
"""For each role the dim of each parameter that `tp` may cut."""


@dataclass
class _Unit:
    """The part of a forward that runs now: a unit, or the code around all of them."""

    seed: int | None = None  # that it draws from; None where nothing may be drawn
    devices: tuple[torch.device, ...] = ()  # whose generators it may draw from
    # activations that have entered a region, by the parent of its columns: before and after
    known: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    inside: list[nn.Module] = field(default_factory=list)  # parents of the columns whose rows have not come yet
    outside: list[Tensor] = field(default_factory=list)  # the states of the generators, as they were before the region
    regions: int = 0  # how many there were


class Entrances:
    """Where regions begin and end, for what is shared by columns of one parent, and for what is drawn inside."""

    # The columns share one sum in backward. In a region each rank draws for its own part from a seed of its own, and
    # after it all draw alike again, since parts that are not equally large have drawn unequally often.

    def __init__(self) -> None:
        self._unit = _Unit()

    @contextmanager
    def drawing(self, seed: int | None, device: torch.device | str) -> Generator[None]:
        """A unit runs inside, with a seed of its own."""
        devices = () if _compat.makes_fakes() else tuple({torch.device("cpu"), torch.device(device)})
        around = self._unit
        self._unit = _Unit(seed, devices)
        try:
            with seeded(seed, device):
                yield
        finally:
            self._unit = around

    def begin(self, parent: nn.Module) -> None:
        """A column begins a region, or goes on with it."""
        unit = self._unit
        if unit.seed is not None and not unit.inside:
            unit.outside = [random_state(device) for device in unit.devices]
            number = unit.regions * axis_size("tp") + axis_index("tp") + 1
            for device in unit.devices:
                reseed((unit.seed + number * _ODD) % 2**64, device)
            unit.regions += 1
        unit.inside += [parent] if parent not in unit.inside else []

    def end(self, parent: nn.Module) -> None:
        """A row ends the region of its parent, or all where its parent has begun none."""
        unit = self._unit
        unit.inside = [p for p in unit.inside if p != parent] if parent in unit.inside else []
        if not unit.inside and unit.outside:
            for device, state in zip(unit.devices, unit.outside, strict=True):
                set_random_state(state, device)
            unit.outside = []

    def enter(self, parent: nn.Module, x: Tensor) -> Tensor:
        """What `ops.copy_to_tp` makes of x, once for each x of a parent."""
        known = self._unit.known.get(parent)
        if known is None or known[0] is not x:
            known = self._unit.known[parent] = x, ops.copy_to_tp(x)
        return known[1]

    def clear(self) -> None:
        """Lets all activations go."""
        self._unit.known.clear()


_ODD = 0xD1342543DE82EF95
"""Between seeds of regions (a multiplier of a linear congruential generator of 64 bits, Steele and Vigna 2021)."""


def install(module: nn.Module, roles: Mapping[str, Role]) -> Entrances:
    """Replace the forwards of the layers that have a role, by path, and of all embeddings."""
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            kind = type(layer)
            # A base class, because a forward of the layer's own may call nn.Embedding's.
            bases = (_Embedding,) if kind is nn.Embedding else (kind, _Embedding)
            layer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
    entrances = Entrances()
    for path, layer in list(module.named_modules()):
        role = roles.get(path)
        if role is None:
            continue
        parent = module.get_submodule(path.rpartition(".")[0])
        whole = layer.forward
        if isinstance(layer, nn.Linear) and role in ("column", "row", "logits"):
            compute = {"column": _column, "row": _row, "logits": _logits}[role]
            vars(layer)["forward"] = functools.partial(compute, layer, whole, parent, entrances)
        elif isinstance(layer, nn.Embedding) and role == "vocab":
            vars(layer)["forward"] = functools.partial(_vocab, layer, whole)
        else:
            siblings = [child for child in parent.children() if isinstance(child, nn.Linear)]
            vars(layer)["forward"] = functools.partial(_inside, whole, Bare(layer, whole), siblings)
    return entrances


class _Embedding(nn.Embedding):
    """An embedding whose gradient is summed in float32 at least."""

    def forward(self, input: Tensor) -> Tensor:
        return look_up(input, self.weight, self.padding_idx)


_Forward: TypeAlias = Callable[..., Any]


def _column(layer: nn.Linear, whole: _Forward, parent: nn.Module, entrances: Entrances, x: Tensor) -> Tensor:
    if layer.weight.shape[0] == layer.out_features:
        return whole(x)
    entrances.begin(parent)
    return F.linear(entrances.enter(parent, x), layer.weight, layer.bias)


def _row(layer: nn.Linear, whole: _Forward, parent: nn.Module, entrances: Entrances, x: Tensor) -> Tensor:
    if layer.weight.shape[1] == layer.in_features:
        return whole(x)
    bias = cast("Tensor | None", layer.bias)
    y = ops.reduce_from_tp(F.linear(x, layer.weight))
    entrances.end(parent)
    return y if bias is None else y + bias


def _logits(layer: nn.Linear, whole: _Forward, parent: nn.Module, entrances: Entrances, x: Tensor) -> Tensor:
    if layer.weight.shape[0] == layer.out_features:
        return whole(x)
    own = F.linear(entrances.enter(parent, x), layer.weight, layer.bias)
    start, stop = boxes.chunk(layer.out_features, axis_size("tp"), axis_index("tp"))
    # A sum, because its transpose is the identity: all ranks go on with the same logits.
    return ops.reduce_from_tp(F.pad(own, (start, layer.out_features - stop)))


def _vocab(layer: nn.Embedding, whole: _Forward, tokens: Tensor) -> Tensor:
    if layer.weight.shape[0] == layer.num_embeddings:
        return whole(tokens)
    result = ops.embedding(tokens, layer.weight, vocab=layer.num_embeddings)
    if layer.padding_idx is None:
        return result
    return torch.where((tokens == layer.padding_idx).unsqueeze(-1), result.detach(), result)


def _inside(whole: _Forward, bare: Bare, siblings: Sequence[nn.Linear], /, *args: Any, **kwargs: Any) -> Any:
    if all(s.weight.shape == (s.out_features, s.in_features) for s in siblings):
        return whole(*args, **kwargs)
    varied = {f"inner.{name}": ops.pvary(p, "tp") for name, p in bare.inner.named_parameters()}
    return torch.func.functional_call(bare, varied, args, kwargs, tie_weights=False)


class Bare(nn.Module):
    """A module whose forward is a given function; the module that has the parameters is inside, as `inner`."""

    def __init__(self, inner: nn.Module, forward: _Forward) -> None:
        super().__init__()
        self.inner = inner
        self._call = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The given function."""
        return self._call(*args, **kwargs)


def check_axes(
    anatomy: Anatomy,
    roles: LayerRoles,
    mesh: Mesh,
    rules: AxisRules,
    heads: Mapping[str, int],
    *,
    tried: Callable[[frozenset[str], int], list[str]],
    over: Collection[str] = (),
) -> None:
    """Refuses a mesh over which the module does not compute."""
    shape = abstract(mesh)
    reasons = {
        "pp": "a forward in one piece has no stages; see fs.model_from_module",
        "cp": "the layers take whole sequences; fs.hf.families.Parts(cp=) may take parts of them",
    }
    hindered = [axis for axis in reasons if axis not in over and shape.axis_size(axis) > 1]
    wrong = [f"{axis}={shape.axis_size(axis)}: {reasons[axis]}" for axis in hindered]
    called_by: dict[int, list[str]] = {}
    for unit in anatomy.units:
        for weight in unit.weights:
            called_by.setdefault(weight.leaf, []).append(weight.name)
    cut_heads = False
    cut_weights = set[str]()
    for i, leaf in enumerate(anatomy.leaves):
        for dim, name in enumerate(leaf.names):
            called = rule_name(name)
            axes = [a for a in rules.get(called, ()) if shape.axis_size(a) > 1] if called is not None else []
            cuts = [a for a in axes if a not in (*DATA_AXES, "pp") or called == EXPERT]
            if not cuts:
                continue
            cut_heads |= called in ("heads", "kv_heads")
            cut_weights |= {*called_by[i]} if "tp" in cuts else set()
            inner = dim - 1 if leaf.stacked else dim
            bad = next((source for source in called_by[i] if not _can_cut(source, roles.roles, inner)), None)
            where = f"{leaf.path} is {type_text(leaf.shape, leaf.dtype)}, dim {dim} ({called!r}) over {', '.join(cuts)}"
            if bad or cuts != ["tp"]:
                source = bad or leaf.sources[0]
                owner = source.rpartition(".")[0]
                role = f"role {roles.roles[owner]!r}" if owner in roles.roles else "no role"
                why = f"{owner} is {roles.refused[owner]}" if owner in roles.refused else None
                wrong.append(f"{where}: {why or f'{source} is of a layer with {role}'}")
            elif leaf.shape[dim] == 1:  # a rank tells by its sizes whether it has a shard
                wrong.append(f"{where}: one rank would have all of it")
    tp = shape.axis_size("tp")
    wrong += [f"{name} is {count}: no multiple of tp={tp}" for name, count in heads.items() if cut_heads and count % tp]
    wrong = wrong or (tried(frozenset(cut_weights), tp) if cut_weights else [])
    if wrong:
        mend = (
            "Leave the axis out of the mesh, or give roles=. Where all ranks may compute alike, set the rules of these"
            ' dims to None, as in fs.DEFAULT_RULES.replace(mlp=None), with tp="replicate" if no leaf is left for tp.'
        )
        raise ConfigError(report(f"fs.plan_layout cannot cut this module on mesh {shape}.", wrong, mend))


def _can_cut(source: str, roles: Mapping[str, Role], dim: int) -> bool:
    """Whether the layer that has a parameter computes with a part of it along a dim."""
    path, _, last = source.rpartition(".")
    role = roles.get(path)
    return role is not None and _CUT[role].get(last) == dim
