"""What laws on random layouts share: this rank's layout of a case, and states whose bits depend on their paths alone."""

from __future__ import annotations

import zlib

import fsharding as fs
from fsharding.checkpoint.state_leaves import content
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import Leaf, assert_bitwise_equal, device_mesh, local_part, whole_tensors


def parts(tree):
    """What this rank holds: a tree of plain local tensors."""
    return fs.tree.map(local_of, tree)


def optimizer():
    return fs.optim.chain(fs.optim.clip_by_global_norm(1e9), fs.adamw(0.1))


def layout_here(leaves, home):
    return home.layout(leaves, device_mesh(home.mesh))


def value_at(path, shape, dtype):
    return Leaf(tuple(shape), dtype).tensor(zlib.crc32(path.encode()))


def some_state(leaves, home):
    """A state whose leaves have bits that depend on their paths and nothing else."""
    layout = layout_here(leaves, home)
    state = fs.init_state(lambda key: whole_tensors(leaves, numbers=True), optimizer(), fs.random.key(0), layout)
    for path, x in content(state).items():
        whole = value_at(path, x.shape, x.local.dtype)
        x.local.copy_(whole if x.sharding is None else local_part(whole, x.sharding))
    # Where params are less cut than main parameters, each rank has more of them than `content` shows.
    for leaf, x in zip(layout.leaves, fs.tree.leaves(state.params), strict=True):
        whole = value_at(leaf.path_in("params"), leaf.shape, layout.precision.main_dtype(leaf.init))
        local_of(x).copy_(local_part(whole.to(x.dtype), leaf.params))
    return state


def content_is_whole(state, layout):
    """Every leaf is the part of `some_state` that this layout says, whatever layout it came from."""
    for path, x in content(state).items():
        whole = value_at(path, x.shape, x.local.dtype)
        assert_bitwise_equal(x.local, whole if x.sharding is None else local_part(whole, x.sharding), path)
