"""The parameters and gradients of a rank's stages during a step: gathered, used, accumulated, reduced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsharding.base import _compat, tree
from fsharding.base.tree import Tree
from fsharding.comm.bucket_queue import BucketQueue
from fsharding.comm.counters import note
from fsharding.comm.handles import Handle, done
from fsharding.comm.leaf_memory import placed_as
from fsharding.comm.leaf_wires import round_params, wires_in_flight
from fsharding.comm.redistribute import BUCKET_BYTES, send
from fsharding.comm.wires import LeafWire
from fsharding.mesh.device_mesh import axis_group, axis_index
from fsharding.models.stacks import map_stacks, stacks_of
from fsharding.pipeline.actions import Action
from fsharding.pipeline.schedule import Schedule
from fsharding.pipeline.stages import layers_by_stage, over_owners
from fsharding.sharding.layout import Layout
from fsharding.sharding.leaf_names import begins
from fsharding.sharding.leaf_plan import LeafLayout
from fsharding.sharding.named_sharding import NamedSharding, local_of
from fsharding.transforms.run_options import RunOptions
from fsharding.transforms.unit_plan import unreduced, whole

__all__ = ["IN_FLIGHT_BYTES", "StageState"]

IN_FLIGHT_BYTES = 4 * BUCKET_BYTES
"""Most bytes of parameters that a rank gathers at a time while it computes, and of gradients that it reduces."""


class StageState:
    """The parameters and gradients of this rank's stages."""

    # A stage that is gathered once per step has full parameters from its GATHER to its last use, and sends quantized
    # weights; otherwise parameters stay sharded and are rounded before the step. Gradients that are reduced once per
    # step stay unreduced until SCATTER; otherwise they accumulate in `layout.grads`. GATHER and SCATTER start as many
    # buckets as fit into `IN_FLIGHT_BYTES`, `advance` (after each compute) starts more, `parts` and `grads` wait. The
    # order depends only on the row, so all data ranks issue collectives in the same order. Each leaf is reduced once,
    # with the last SCATTER of the stages that have it.

    def __init__(
        self, model: Any, schedule: Schedule, layout: Layout, params: Tree, options: RunOptions, *, trains: bool = True
    ) -> None:
        """Allocate zero gradients, and round parameters if stages aren't gathered once per step (collective)."""
        precision = options.precision
        key = options.key
        self.model = model
        self.schedule = schedule
        self.layout = layout
        self.precision = precision.of_rounded()
        self.rank = axis_index("pp", layout.mesh)
        row = schedule.actions_on(self.rank)
        own = schedule.stages_on(self.rank)
        # Stages are gathered once per step; gradients are reduced for each microbatch.
        self.once = any(a.kind == "GATHER" and a.microbatch is None for a in row)
        self.each = any(a.kind == "SCATTER" and a.microbatch is not None for a in row)
        self.params = params if self.once else round_params(params, layout, precision, key)
        self._wires = wires_in_flight(params, layout, precision, key) if self.once else []
        counts = layers_by_stage(model, schedule, layout)
        starts = [0] * len(stacks_of(model))
        self._layers = counts
        self._rows: dict[int, list[tuple[int, int]]] = {}
        for stage in own:
            self._rows[stage] = [(start, start + n) for start, n in zip(starts, counts[stage], strict=True)]
            starts = [stop for _, stop in self._rows[stage]]
        self._homes = [_home_of_sums(leaf, self.each) if trains and leaf.trainable else None for leaf in layout.leaves]

        self._sums = [
            None if home is None else _zeros(home, leaf.shape, self.precision.grad_dtype(layout.param_dtype(leaf)))
            for leaf, home in zip(layout.leaves, self._homes, strict=True)
        ]
        self._uses = Counter(a.stage for a in row if a.uses_parameters)
        self._scatters = Counter(a.stage for a in row if a.kind == "SCATTER")
        last = {a.stage: i for i, a in enumerate(row) if a.kind == "SCATTER"}
        numbers = self._tree(range(len(layout.leaves)))
        self._leaves = {stage: tree.leaves(self._part(numbers, stage)) for stage in own}
        # Stages may share a leaf outside of stacks, such as a tied embedding: the last of them to SCATTER reduces it.
        shared = {i for i, leaf in enumerate(layout.leaves) if not begins(leaf.path, "blocks")}
        in_order = sorted(last, key=last.__getitem__)
        self._reduced_with = {i: stage for stage in in_order for i in self._leaves[stage] if i in shared}
        self._reduced: dict[int, dict[int, Tensor]] = {}
        self._gathers, self._reductions = BucketQueue(IN_FLIGHT_BYTES), BucketQueue(IN_FLIGHT_BYTES)
        self._gathering: dict[int, Handle[Tree]] = {}
        self._reducing: dict[int, tuple[list[int], Handle[Tree]]] = {}
        # By gathered stage: its parameters, the shardings of its gradients, and their sums so far.
        self.work = {} if self.once else {stage: self._work(stage, self._part(self.params, stage)) for stage in own}

    def _tree(self, leaves: Sequence[Any]) -> Tree:
        return tree.unflatten(self.layout.structure, leaves)

    def _work(self, stage: int, params: Tree) -> tuple[Tree, Tree, Tree]:
        return params, self._part(self._tree(self._homes), stage), self._part(self._tree(self._sums), stage)

    def _part(self, values: Tree, stage: int) -> Tree:
        """Return a stage's part of a tree of parameters or shardings."""

        def rows(i: int, stack: Tree) -> Tree:
            return tree.map(lambda x: _rows(x, *self._rows[stage][i]), stack)

        part = {"blocks": map_stacks(self.model, rows, values["blocks"])}
        if stage == 0:
            part["embed"] = values["embed"]
        if stage == self.schedule.stages - 1:
            part["head"] = values["head"]
            part["tied"] = {name: tree.at(values, path) for name, path in self.model.tied}
        return part

    def layers(self, stage: int) -> Callable[[str], tuple[int, int] | None]:
        """Return a function from the path of a stacked leaf to its first layer and the stack's number of layers."""
        columns = zip((path for path, _ in stacks_of(self.model)), zip(*self._layers, strict=True), strict=True)
        stacks = [(path, (sum(counts[:stage]), sum(counts))) for path, counts in columns]
        return lambda leaf: next((place for path, place in stacks if begins(leaf, path)), None)

    # ------------------------------------------------------------------------------------------------------- parameters
    def gather(self, stage: int) -> None:
        """Start to gather the parameters of a stage over the data axes, in the compute dtype; `parts` waits."""
        leaves = self.layout.leaves
        homes = self._tree([replace(whole(leaf.params), assigned=leaf.params.assigned) for leaf in leaves])
        dtypes = self._tree([self.precision.compute_dtype(self.layout.param_dtype(leaf)) for leaf in leaves])
        trees = (self.params, homes, dtypes, self._tree(self._wires))
        part, to, kinds, own = (self._part(values, stage) for values in trees)
        wires = tree.flatten_up_to(tree.flatten(part)[1], own)
        with _compat.region("gather"):
            moving = self._gathering[stage] = send(part, to, self._gathers, dtypes=kinds, wires=wires)
        if moving.is_ready():
            self.parts(stage)

    def parts(self, stage: int) -> tuple[Tree, Tree, Tree]:
        """Return a stage's parameters, the shardings of its gradients, and their sums so far; wait for its gather."""
        moving = self._gathering.pop(stage, None)
        if moving is not None:
            with _compat.region("gather"):
                self.work[stage] = self._work(stage, moving.wait())
            note("wait", Action("GATHER", stage))
        return self.work[stage]

    def stand_ins(self, stage: int, device: torch.device) -> Tree:
        """Return tensors without values, shaped like the gathered parameters of any stage but the last."""
        counts = layers_by_stage(self.model, self.schedule, self.layout)[stage]

        def look_like(leaf: LeafLayout, rows: int | None) -> Tensor:
            shape = whole(leaf.params).local_shape(leaf.shape)
            dtype = self.precision.compute_dtype(self.layout.param_dtype(leaf))
            return torch.empty(shape if rows is None else (rows, *shape[1:]), dtype=dtype, device=device)

        leaves = self._tree(self.layout.leaves)
        stacks = map_stacks(
            self.model, lambda i, stack: tree.map(lambda leaf: look_like(leaf, counts[i]), stack), leaves["blocks"]
        )
        embed = tree.map(lambda leaf: look_like(leaf, None), leaves["embed"])
        return {"blocks": stacks, "embed": embed} if stage == 0 else {"blocks": stacks}

    def used(self, stage: int) -> None:
        """Count a use of a stage's parameters, and free gathered ones after the last."""
        self._uses[stage] -= 1
        if self.once and not self._uses[stage]:
            del self.work[stage]

    def advance(self) -> None:
        """Finish the oldest gather or reduction in flight if others wait for room, and start those that fit."""
        with _compat.region("gather"):
            self._gathers.advance()
        with _compat.region("scatter"):
            self._reductions.advance()

    # -------------------------------------------------------------------------------------------------------- gradients
    def scatter(self, stage: int, last: Callable[[], object] | None = None) -> None:
        """At the last SCATTER of a stage, start to reduce its gradients to the optimizer's shardings."""
        # `last` finishes reductions that still add to these gradients; it runs before these start, after the next
        # compute at the earliest, so that they overlap with it.
        self._scatters[stage] -= 1
        if self._scatters[stage]:
            return
        note("start", Action("SCATTER", stage))
        sums = tree.leaves(self._part(self._tree(self._sums), stage))
        trained = [i for i in self._leaves[stage] if self._sums[i] is not None]
        parts = dict(zip(trained, sums, strict=True))
        with _compat.region("scatter"):
            if last is not None:
                # It sends nothing, but its size leaves no room in the queue: no bucket starts before it has run.
                self._reductions.add(1 << 62, lambda: done(last, communicates=True))
            self._reduce(stage, {i: x for i, x in parts.items() if self._reduced_with.get(i, stage) == stage})

    def _reduce(self, stage: int, parts: dict[int, Any]) -> None:
        homes = [self._homes[i] for i in parts]
        mains = [self.layout.leaves[i].main.on_device for i in parts]
        native = self.precision.sums_natively(getattr(self.layout.mesh, "device_type", None))
        moving = send([*parts.values()], mains, self._reductions, sources=homes, native=native)
        self._reducing[stage] = [*parts], moving

    def grads(self) -> Tree:
        """Return all gradients in `layout.reduced`, summed over stages that share a leaf. Collective over `pp`."""
        group = axis_group(self.layout.mesh, ("pp",))
        started = {i for indices, _ in self._reducing.values() for i in indices}
        with _compat.region("scatter"):
            # Leaves that this rank has no part of, whose sums are empty.
            self._reduce(-1, {i: x for i, x in enumerate(self._sums) if x is not None and i not in started})
            for stage, (indices, moving) in self._reducing.items():
                for i, grad in zip(indices, moving.wait(), strict=True):
                    self._reduced.setdefault(i, {})[stage] = local_of(grad)
                if stage >= 0:
                    note("wait", Action("SCATTER", stage))
        result: list[DTensor | None] = []
        for i, (leaf, total) in enumerate(zip(self.layout.leaves, self._sums, strict=True)):
            if total is None:
                result.append(None)
                continue
            parts = [x for _, x in sorted(self._reduced[i].items())]
            local = parts[0] if len(parts) == 1 else torch.cat(parts)
            grad = leaf.main.simplified().at_rest(local, tuple(total.shape))
            grad = over_owners(grad, leaf.main, group, self.rank)
            result.append(placed_as(grad, leaf.reduced))
        return self._tree(result)

    def close(self) -> None:
        """Release what is in flight after a failure."""
        self._gathers.release()
        self._reductions.release()


def _rows(x: Any, start: int, stop: int) -> Any:
    """Return some rows of a stacked leaf, or its wire; rows have the stack's sharding and dtype."""
    if isinstance(x, LeafWire):
        return x.of_rows(start, stop)
    if not isinstance(x, DTensor):
        return x
    local = local_of(x)[start:stop]
    return _compat.make_dtensor(local, x.device_mesh, x.placements, (stop - start, *x.shape[1:]))


def _home_of_sums(leaf: LeafLayout, each: bool) -> NamedSharding:
    """Return the sharding of summed gradients: the layout's if each microbatch is reduced, else unreduced."""
    # On the device, whatever the layout's memory: every microbatch adds to them.
    return leaf.grads.on_device if each else replace(unreduced(leaf.params), assigned=leaf.params.assigned)


def _zeros(home: NamedSharding, shape: tuple[int, ...], dtype: torch.dtype) -> DTensor:
    local = torch.zeros(home.local_shape(shape), dtype=dtype, device=home.device_type)
    return home.simplified().to_dtensor(local, shape)
