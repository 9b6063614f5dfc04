"""Parameters that are unlike those of a decoder: tied, repeated, scalar, unused, nested, too small for the ranks."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

import fsharding as fs
from fsharding.mesh.device_mesh import data_rank_and_size
from tests.training import ROWS


class Toy(NamedTuple):
    """Shapes and a loss; `shapes` maps to (shape) or (shape, dtype)."""

    shapes: Any
    loss: Any
    inputs: int
    outputs: int
    frozen: tuple[str, ...] = ()
    names: Any = None
    rtol: float = 1e-4


def toy_draws(toy):
    """One draw for each leaf, all with keys of their own."""
    leaf = lambda x: isinstance(x, tuple) and (not x or isinstance(x[0], int | tuple))  # noqa: E731
    flat, spec = fs.tree.flatten(toy.shapes, is_leaf=leaf)
    keys = fs.random.split(fs.random.key(3), len(flat)).unbind(0)
    draws = []
    for key, item in zip(keys, flat, strict=True):
        shape, dtype = item if item and isinstance(item[0], tuple) else (item, torch.float32)
        draws.append(fs.random.normal(key, shape, std=0.5, mean=0.1, dtype=dtype))
    return fs.tree.unflatten(spec, draws)


def squares(out, batch):
    return (out.float() - batch["y"]).square().sum(), torch.tensor(float(out.shape[0]))


def layer(unit, x):
    return torch.tanh(x @ unit["w"].to(x.dtype).T + unit["b"].to(x.dtype))


def listed(params, batch):
    return squares(fs.scan_units(layer, params, batch["x"]), batch)


def listed_with_remat(params, batch):
    return squares(fs.scan_units(layer, params, batch["x"], policy=fs.policies.nothing_saveable), batch)


def with_scalars(params, batch):
    x = fs.scan_units(layer, params["layers"], batch["x"])
    unit = fs.gather_unit({"scale": params["scale"], "shift": params["shift"], "v": params["v"]})
    return squares((x * unit["scale"] + unit["shift"].tanh()) * unit["v"], batch)


def tied_last(params, batch):
    """`t` is in two units, in both after a leaf of their own."""
    first = fs.gather_unit({"a": params["a"], "t": params["t"]})
    x = torch.tanh(torch.tanh(batch["x"] @ first["a"]) @ first["t"])
    second = fs.gather_unit({"b": params["b"], "t": params["t"]})
    return squares(torch.tanh(x @ second["t"].T) @ second["b"], batch)


def tied_first(params, batch):
    """`t` is in two units, in both before a leaf of their own."""
    first = fs.gather_unit([params["t"], params["a"]])
    x = torch.tanh(torch.tanh(batch["x"] @ first[1]) @ first[0])
    second = fs.gather_unit([params["t"], params["b"]])
    return squares(torch.tanh(x @ second[0].T) @ second[1], batch)


def tied_alone(params, batch):
    """`t` is in two units, in one of them alone, and twice inside the other."""
    first = fs.gather_unit({"t": params["t"], "again": params["t"], "a": params["a"]})
    x = torch.tanh(torch.tanh(batch["x"] @ first["a"]) @ (first["t"] + first["again"]))
    second, third = fs.gather_unit(params["t"]), fs.gather_unit(params["b"])
    return squares(torch.tanh(x @ second.T) @ third, batch)


def repeated(params, batch):
    """One unit is used three times, as in a universal transformer."""
    x = fs.scan_units(layer, [params["in"], params["mid"], params["mid"], params["mid"], params["out"]], batch["x"])
    return squares(x, batch)


def stacked(params, batch):
    x = fs.scan_units(layer, params["blocks"], batch["x"], next_unit=params["out"])
    return squares(layer(fs.gather_unit(params["out"]), x), batch)


def stack_and_row(params, batch):
    """A stack is used whole, and one of its rows as a unit of its own."""
    row = fs.gather_unit(fs.select_unit(params["blocks"], 1))
    every = fs.gather_unit(params["blocks"])
    x = layer(row, layer({"w": every["w"].mean(0), "b": every["b"].sum(0)}, batch["x"]))
    return squares(layer(fs.gather_unit(params["out"]), x), batch)


def held_open(params, batch):
    """A unit is gathered first and used inside every other one."""
    shared, x = fs.gather_unit(params["shared"]), batch["x"]
    for unit in params["units"]:
        w = fs.gather_unit(unit)["w"]
        x = torch.tanh(torch.tanh(torch.tanh(x @ w) @ shared["w"]) @ w.T)
    return squares(x, batch)


def dead_branch(params, batch):
    """Units whose result never reaches the loss stand between those that do."""
    x = layer(fs.gather_unit(params[0]), batch["x"])
    unused = layer(fs.gather_unit(params[1]), x)
    x = layer(fs.gather_unit(params[2]), x)
    unused = layer(fs.gather_unit(params[3]), unused)
    return squares(layer(fs.gather_unit(params[4]), x + 0 * unused.detach().mean()), batch)


def unused(params, batch):
    """A leaf of a unit that is used, and a unit that is never gathered, have no part in the loss."""
    first = fs.gather_unit(params["first"])
    second = fs.gather_unit(params["second"])
    return squares(torch.tanh(batch["x"] @ first["w"].T) @ second["w"].T, batch)


def layers_of(*widths):
    return [{"w": (b, a), "b": (b,)} for a, b in itertools.pairwise(widths)]


def half(*shape):
    return shape, torch.bfloat16


def double(*shape):
    return shape, torch.float64


LAYERS = {"w": ("layers", None, None), "b": ("layers", None)}
SQUARE = {"blocks": {"w": (3, 6, 6), "b": (3, 6)}, "out": layers_of(6, 3)[0]}
SQUARE_NAMES = {"blocks": LAYERS, "out": {"w": (None, None), "b": (None,)}}
TIED_SHAPES = {"a": (6, 5), "b": (5, 3), "t": (5, 7)}
TOYS = {
    "16-15-8": Toy(layers_of(16, 15, 8), listed, 16, 8),
    "7-15-3": Toy(layers_of(7, 15, 3), listed, 7, 3),
    "16-17-8": Toy(layers_of(16, 17, 8), listed_with_remat, 16, 8),
    "smaller than the ranks": Toy(layers_of(3, 2, 1, 3), listed, 3, 3),
    "scalars": Toy({"layers": layers_of(5, 3), "scale": (), "shift": (), "v": (1,)}, with_scalars, 5, 3),
    "nothing in it": Toy([*layers_of(5, 3), {"w": (3, 3), "b": (3,), "none": (0, 4), "neither": (4, 0)}], listed, 5, 3),
    "tied, last in its units": Toy(TIED_SHAPES, tied_last, 6, 3),
    "tied, first in its units": Toy(TIED_SHAPES, tied_first, 6, 3),
    "tied, alone in its unit": Toy(TIED_SHAPES, tied_alone, 6, 3),
    "one unit three times": Toy(dict(zip(("in", "mid", "out"), layers_of(6, 5, 5, 3), strict=True)), repeated, 6, 3),
    "frozen unit": Toy(layers_of(6, 5, 4, 3), listed, 6, 3, ("1",)),
    "frozen leaf": Toy(layers_of(6, 5, 4, 3), listed, 6, 3, ("0.w", "2.b")),
    "frozen stack": Toy(SQUARE, stacked, 6, 3, ("blocks",), SQUARE_NAMES),
    "all but one frozen": Toy(layers_of(6, 5, 3), listed, 6, 3, ("0", "1.w")),
    "stack": Toy(SQUARE, stacked, 6, 3, (), SQUARE_NAMES),
    "stack and row": Toy(SQUARE, stack_and_row, 6, 3, (), SQUARE_NAMES),
    "held open": Toy({"shared": {"w": (5, 5)}, "units": [{"w": (6, 5)}, {"w": (6, 5)}, {"w": (6, 5)}]}, held_open, 6, 6),
    "dead branch": Toy(layers_of(6, 6, 6, 6, 6, 6), dead_branch, 6, 6),
    "unused": Toy({"first": {"w": (5, 6), "b": (5,)}, "second": {"w": (3, 5)}, "third": {"w": (3, 3)}}, unused, 6, 3),
    "dtypes": Toy(
        [{"w": (5, 6), "b": double(5)}, {"w": half(4, 5), "b": (4,)}, {"w": double(3, 4), "b": half(3)}], listed, 6, 3,
        rtol=3e-2,
    ),
}  # fmt: skip


def toy_batches(toy, mesh, steps):
    generator = torch.Generator().manual_seed(5)
    index, count = data_rank_and_size(mesh)
    for _ in range(steps):
        x = torch.randn(ROWS, toy.inputs, generator=generator)
        y = torch.randn(ROWS, toy.outputs, generator=generator)
        yield {"x": x.chunk(count)[index], "y": y.chunk(count)[index]}
