"""Functions and marks that tests of several rooms share: refusals, meshes, batches of tokens, how a slow case is marked."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsharding as fs
from fsharding.base import _compat
from fsharding.base.dtypes import wide
from fsharding.base.errors import FshardingError
from fsharding.contrib import pairwise
from fsharding.formats import codec
from fsharding.mesh.abstract_mesh import AXES
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.sharding.named_sharding import local_of

# torch says at length that `full_tensor` gathers axis by axis.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

TRANSPORTS = ["native", "pairwise", "shared_memory"]

full = pytest.mark.full
"""Marks a case for `make test-full` alone: `pytest.param(..., marks=full)`, or `@full` for a whole test."""

slow = pytest.mark.slow
"""Marks a case that `make test` leaves out and `make test-laws` runs."""

fake_groups_write = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="fake groups of torch before 2.13 leave the results of reductions unwritten"
)
"""Marks a test that computes with numbers on ranks that are not there."""

cpu_multiplies_codes = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch before 2.13 has no scaled products on the CPU"
)
"""Marks a test of a kernel that multiplies quantized matrices on the CPU."""


def crossed(
    *columns: Iterable[Any] | Mapping[str, tuple[Any, ...]], kept: Iterable[str], name: Callable[[Any], str] = str
) -> list[Any]:
    """Cases of a product of columns, of which those whose ids are not in `kept` are marked full.

    A column is a list of values, whose ids `name` gives, or a dict from ids to the arguments that they stand for.
    """
    named = [
        [*column.items()] if isinstance(column, Mapping) else [(name(value), (value,)) for value in column]
        for column in columns
    ]
    cases = {
        "-".join(part for part, _ in row): [argument for _, arguments in row for argument in arguments]
        for row in itertools.product(*named)
    }
    assert {*kept} <= {*cases}, {*kept} - {*cases}
    return [pytest.param(*case, id=i, marks=[] if i in kept else full) for i, case in cases.items()]


FULL = settings.default.max_examples >= 500
"""Whether Hypothesis looks for as many examples as `make test-full` asks for."""


QUICK = settings.default.max_examples < 50
"""Whether Hypothesis looks for as few examples as `make test` asks for."""


def examples(few: int, many: int) -> settings:
    """How many examples a law gets in `make test-laws` and in `make test-full`; `make test` has a fifth of the few.

    One on ranks takes tenths of a second, so that such laws get a few hundred at most.
    """
    return settings(max_examples=many if FULL else max(few // 5, 1) if QUICK else few)


def refusal(call: Callable[..., Any], *args: Any, kind: type[Exception] = FshardingError, **kwargs: Any) -> str:
    """The text of the error of this kind that a call ends with."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def words_of_torch(function: Callable[..., Any], *shapes: Sequence[int]) -> str:
    """What torch says, as a sentence, of a call with tensors of these shapes: its words differ between releases."""
    with pytest.raises(RuntimeError) as caught:
        function(*map(torch.zeros, shapes))
    return f"{str(caught.value).partition(chr(10))[0].rstrip('.')}."


# -------------------------------------------------------------------------------------------------------------- disks
@contextmanager
def small_disk(path: Path, kib: int) -> Generator[None]:
    """Mount a file system of this size over a directory; skip the test where that is not allowed."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


# -------------------------------------------------------------------------------------------------------------- ranks
def mesh_of(
    axes: Mapping[str, int],
    *,
    order: Sequence[str] = AXES,
    ranks: Sequence[int] | None = None,
    transport: str = "auto",
) -> DeviceMesh:
    """A mesh of CPU ranks, made once for each process; a collective on it fails after 20 seconds."""
    return _mesh(tuple(axes.items()), tuple(order), ranks, transport)


@functools.cache
def _mesh(axes: Any, order: Any, ranks: Any, transport: Any) -> DeviceMesh:
    timeout = timedelta(seconds=20)
    return fs.make_mesh(device="cpu", timeout=timeout, order=order, ranks=ranks, transport=transport, **dict(axes))


@contextmanager
def point_to_point() -> Generator[None]:
    """Has the pairwise transport send rows of any size by sends and receives.

    A thread of gloo's own, which runs its collectives, may hold their buffers a moment longer than `wait` says; sends
    and receives end in the thread that waits.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairwise, "SHORT", -1)
        yield


@contextmanager
def fake_ranks(rank: int, **axes: int) -> Generator[DeviceMesh]:
    """A mesh as one of its ranks has it, in this process alone: collectives of its groups send nothing."""
    _compat.start_fake_group(rank, math.prod(axes.values()))
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()


def until(condition: Callable[[], object], seconds: float = 90) -> bool:
    """Wait for a condition, which hangs if it doesn't hold after so long; return whether it holds."""
    end = time.monotonic() + seconds  # no assert: a limit for what hangs
    while not condition() and time.monotonic() < end:  # no assert: the same
        time.sleep(0.01)
    return bool(condition())


class Calls:
    """The number of calls of functions, Python's and C's, on this thread: work that is the same on every machine."""

    count = 0


@contextmanager
def counted_calls() -> Generator[Calls]:
    """Count the calls inside the block."""
    calls = Calls()

    def note(frame: object, event: str, arg: object) -> None:
        calls.count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


# ------------------------------------------------------------------------------------------------------ values of leaves
def token_batch(
    seed: int, *, vocab: int = 64, rows: int = 4, positions: int = 8, mesh: DeviceMesh | None = None
) -> dict[str, torch.Tensor]:
    """Random tokens and the next ones as targets: all rows, or those of this rank's place on the mesh's data axes."""
    tokens = torch.randint(vocab, (rows, positions + 1), generator=torch.Generator().manual_seed(seed))
    if mesh is not None:
        index, count = data_rank_and_size(mesh)
        tokens = tokens.chunk(count)[index]
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def normal_tree(shapes: Any, seed: int) -> Any:
    """Whole leaves of a tree of shapes, from one generator in the order of the leaves."""
    generator = torch.Generator().manual_seed(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return fs.tree.map(lambda shape: torch.randn(shape, generator=generator), shapes, is_leaf=is_shape)


def whole(values: Any) -> dict[str, torch.Tensor]:
    """Leaves by path; those that are sharded put together by torch itself."""
    return {path: getattr(x, "full_tensor", lambda x=x: x)() for path, x in fs.tree.named_leaves(values).items()}


def bits(values: Any) -> Any:
    """Copies of what this rank has of each tensor of a tree."""
    return fs.tree.map(lambda x: local_of(x).clone() if isinstance(x, torch.Tensor) else x, values)


def decoded(moment: Any) -> torch.Tensor:
    """The numbers of a moment of one process, whatever it is kept in, in float32 at least."""
    if not isinstance(moment, fs.optim.CodedMoment):
        return local_of(moment).to(wide(moment.dtype))
    x = codec.decode(local_of(moment.values), codec.Scales(local_of(moment.scales)), moment.format)
    return x.square() if moment.root else x


class Largest(TorchDispatchMode):
    """The most elements of any one tensor that is made while it is on."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in fs.tree.leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out
