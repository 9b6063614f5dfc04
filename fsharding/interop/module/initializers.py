"""Initial values of a module's parameters, as lazy leaves: the module's own, or new ones for meta parameters.

Guarantee: the values of a leaf don't depend on the slice that is computed, so every layout gets the same values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fsharding.base import _compat, _functorch, devices
from fsharding.base.errors import ConfigError, report
from fsharding.interop.module.structure import FUNCTION, ModuleLeaf
from fsharding.mesh.consistency import checksum
from fsharding.sharding import random
from fsharding.sharding.leaf_names import joined
from fsharding.sharding.leaf_plan import kind_text, type_text

__all__ = [
    "LazyLeaf", "Reset", "generator_bytes", "lazy_leaves", "real_buffers", "seed_of", "seeded",
]  # fmt: skip

Reset: TypeAlias = Callable[[nn.Module], object]
"""Initializes the tensors of a submodule, without its children, in place."""


def seed_of(key: Tensor) -> int:
    """Convert a key to a seed for torch's generators; 0 under `FakeTensorMode`, where keys have no values."""
    high, low = (0, 0) if _compat.is_fake(key) else key.tolist()
    return (high << 32) | low


@contextmanager
def seeded(seed: int | None, device: torch.device | str = "cpu") -> Generator[None]:
    """Seed torch's generators of the CPU and of a device in this block, and restore them after it."""
    if seed is None or _compat.makes_fakes():
        yield
        return
    device = torch.device(device)
    here = devices.is_here(device.type)
    with torch.random.fork_rng(devices=[device] if here else [], device_type=device.type if here else "cuda"):
        torch.default_generator.manual_seed(seed)
        if here:
            torch.get_device_module(device).manual_seed(seed)
        yield


def generator_bytes(device: torch.device) -> bytes | None:
    """Return the state of a device's generator for comparison, without an operation that a dispatch mode could see."""
    # None while a graph is captured, which forbids reading the state, and under `FakeTensorMode`, which never draws.
    if _compat.makes_fakes() or devices.is_capturing(device):
        return None
    with _functorch.outside_transforms():
        module = torch.get_device_module(device) if devices.is_here(device.type) else None
        state = torch.get_rng_state() if module is None else module.get_rng_state(device)
        return state.numpy().tobytes()


@dataclass(frozen=True)
class LazyLeaf:
    """One leaf; indexing it computes the values of a slice."""

    shape: tuple[int, ...]  # the first dim of a stacked leaf counts the rows
    dtype: torch.dtype
    parts: tuple[Callable[[], Tensor], ...]  # compute each row of a stack, else the full leaf
    stacked: bool  # whether the first dim counts rows
    drawn: tuple[str | None, ...]  # how each part is initialized; None for values of the module

    def rows(self, chosen: slice) -> LazyLeaf:
        """Select rows of a stack, as a stack."""
        parts = self.parts[chosen]
        return LazyLeaf((len(parts), *self.shape[1:]), self.dtype, parts, stacked=True, drawn=self.drawn[chosen])

    def described(self) -> str:
        """Describe the values, equally on ranks with equal values: a checksum, or the seed they are drawn from."""
        held = [part() for part, drawn in zip(self.parts, self.drawn, strict=True) if drawn is None]
        texts = list(dict.fromkeys(filter(None, self.drawn)))
        if any(_compat.is_fake(x) for x in held):
            held = []
        texts += [f"of checksum {checksum(*held):016x}"] if held else []
        return " ".join([type_text(self.shape, self.dtype), *texts])

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        if not self.stacked:
            return self.parts[0]()[index]
        chosen = self.parts[index[0]]
        shape = [len(range(*s.indices(size))) for s, size in zip(index, self.shape, strict=True)]
        out = torch.empty(shape, dtype=self.dtype)
        for row, part in zip(out, chosen, strict=True):
            row.copy_(part()[index[1:]])
        return out


def lazy_leaves(
    module: nn.Module, leaves: Sequence[ModuleLeaf], key: Tensor, reset: Reset | None
) -> dict[str, LazyLeaf]:
    """Make the lazy leaves of a module, by path."""
    owners = dict(module.named_modules(remove_duplicate=False))
    order = {name: i for i, name in enumerate(owners)}
    wrong: list[str] = []

    def refuse() -> Tensor:  # only once values are computed: a plan needs none, nor does loading weights
        mend = "Make the module with real tensors, or pass reset=, a function that fills the parameters of a submodule."
        raise ConfigError(report(f"{FUNCTION} cannot initialize parameters on the meta device.", wrong, mend))

    def part(name: str) -> tuple[Callable[[], Tensor], str | None]:
        path, _, last = name.rpartition(".")
        owner = owners[path]
        if not getattr(owner, last).is_meta:
            return lambda: getattr(owner, last).detach(), None
        if (method := reset or getattr(type(owner), "reset_parameters", None)) is None:
            text = kind_text(getattr(owner, last))
            wrong.append(f"{name} is {text} of {type(owner).__name__}, which has no reset_parameters")
            return refuse, "without values"
        draw = lambda: _drawn(owner, path, last, method, random.fold_in(key, order[path]))  # noqa: E731
        return draw, f"drawn by {type(owner).__name__} from seed {seed_of(key)}"

    def lazy(leaf: ModuleLeaf) -> LazyLeaf:
        parts, drawn = zip(*map(part, leaf.sources), strict=True)
        return LazyLeaf(leaf.shape, leaf.dtype, parts, leaf.stacked, drawn)

    return {leaf.path: lazy(leaf) for leaf in leaves}


def _drawn(owner: nn.Module, path: str, name: str, method: Reset, key: Tensor) -> Tensor:
    """Initialize one parameter of a submodule, together with its others."""
    with seeded(seed_of(key)):
        filled = getattr(_reset_copy(owner, method), name)
    if filled.is_floating_point() and bool(filled.isnan().any()):
        rows = [f"{joined(path, name)} of {type(owner).__name__}"]
        mend = "Pass reset=, a function that fills every parameter of a submodule."
        raise ConfigError(report(f"{FUNCTION} finds a parameter that its reset does not fill.", rows, mend))
    return filled.detach()


@torch.no_grad()
def _reset_copy(owner: nn.Module, method: Reset) -> Any:
    """Copy a submodule with new tensors on the CPU and initialize them; values that aren't set are NaN."""

    def fresh(x: Tensor) -> Tensor:
        new = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        new.fill_(torch.nan if new.is_floating_point() else 0)
        return nn.Parameter(new, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else new

    own = [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]
    filled = copy.deepcopy(owner, {**{id(x): fresh(x) for x in own}, **{id(c): c for c in owner.children()}})
    with torch.device("cpu"):  # the caller may be inside `with torch.device("meta")`
        method(filled)
    return filled


def real_buffers(module: nn.Module, reset: Reset | None) -> dict[str, Tensor]:
    """Initialize the buffers on the meta device, by name."""
    result: dict[str, Tensor] = {}
    wrong: list[str] = []
    for path, owner in module.named_modules():
        named = {name: b for name, b in owner.named_buffers(recurse=False) if b.is_meta}
        method = reset or getattr(type(owner), "reset_parameters", None)
        filled = None if method is None or not named else _reset_copy(owner, method)
        for name, buffer in named.items():
            full = joined(path, name)
            value = getattr(filled, name, None)
            if value is None or (value.is_floating_point() and bool(value.isnan().any())):
                wrong.append(f"{full} is {kind_text(buffer)} of {type(owner).__name__}")
            else:
                result[full] = value
    if wrong:
        mend = "Make these submodules with real tensors, or pass reset=, a function that fills the buffers of one."
        raise ConfigError(report(f"{FUNCTION} finds buffers on the meta device that nothing fills.", wrong, mend))
    return result
