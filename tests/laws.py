"""The laws of the design on the layout of one case, for this rank, and states whose bits depend on their paths alone."""

from __future__ import annotations

import functools
import zlib

import torch

import fsharding as fs
from fsharding.checkpoint.state_leaves import content
from fsharding.mesh.device_mesh import abstract, coordinate, data_axes
from fsharding.sharding.named_sharding import local_of, to_local
from fsharding.testing import (
    Leaf,
    assert_adjoint,
    assert_bitwise_equal,
    device_mesh,
    local_part,
    rank_values,
    whole_tensors,
)
from fsharding.train.state import main_of


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


def draws_of(leaves, key):
    """Lazy draws for floats; what has no gradient is whole."""

    def make(path, leaf):
        if not leaf.dtype.is_floating_point:
            return leaf.tensor(1)
        return fs.random.normal(fs.random.fold_in(key, zlib.crc32(path.encode())), leaf.shape, dtype=leaf.dtype)

    return fs.tree.map_with_path(make, leaves)


def init_is_part_of_the_whole(leaves, home):
    """Every rank compares its slices with the whole draw."""
    layout, opt, key = layout_here(leaves, home), optimizer(), fs.random.key(7)
    state = fs.init_state(lambda key: draws_of(leaves, key), opt, key, layout)
    inner = fs.random.split(key)[0]
    whole = [d if isinstance(d, torch.Tensor) else d.tensor() for d in fs.tree.leaves(draws_of(leaves, inner))]
    dtypes = layout.precision
    for x, value, leaf in zip(fs.tree.leaves(state.params), whole, layout.leaves, strict=True):
        want = value.to(dtypes.main_dtype(leaf.init)).to(layout.param_dtype(leaf))
        assert_bitwise_equal(local_of(x), local_part(want, leaf.params), leaf.path)
    if state.main is not None:
        mains = fs.tree.flatten_up_to(layout.structure, state.main, "test")
        for x, value, leaf in zip(mains, whole, layout.leaves, strict=True):
            assert (x is None) == (not leaf.trainable)
            if x is not None:
                assert_bitwise_equal(
                    local_of(x), local_part(value.to(dtypes.main_dtype(leaf.init)), leaf.main), leaf.path
                )
    assert_bitwise_equal(state.key, fs.random.split(key)[1].clone())


def save(leaves, home, folder):
    fs.checkpoint.save(folder, some_state(leaves, home))


def load(leaves, home, folder, given_opt):
    layout = layout_here(leaves, home)
    content_is_whole(fs.checkpoint.load(folder, layout, opt=optimizer() if given_opt else None), layout)


def trains_as_plain_torch(case):
    """Runs the case; each step's state has the bytes that the layout says, and gradients too."""
    opt, layout = fs.sgd(1 / 16, momentum=0.5), layout_here(case.leaves, case.home)
    here = case.home.layout(case.leaves).memory(opt, coordinate(layout.mesh))
    assert layout.memory(opt) == here
    state = fs.init_state(lambda key: whole_tensors(case.leaves, numbers=True), opt, fs.random.key(0), layout)
    step = fs.make_train_step(case.loss, opt, microbatches=case.microbatches, donate=case.donate)
    _, grads = fs.value_and_grad(case.loss, grads=layout.grads, mean=False)(state.params, case.batch(0, layout.mesh))
    assert fs.debug.state_bytes(grads) == here.grads
    for number in range(case.steps):
        assert fs.debug.state_bytes((state.params, state.main, state.opt_state)) == here.state
        state, metrics = step(state, case.batch(number, layout.mesh))
    specs = fs.tree.leaves(layout.params), fs.tree.leaves(layout.main)
    main = main_of(state)
    assert [str(s) for s in specs[1]] == [str(fs.typeof(x).sharding) for x in fs.tree.leaves(main)]
    want, losses = in_plain_torch(case)
    found = dict(zip(fs.tree.paths(state.params), fs.tree.leaves(state.params), strict=True))
    cut = {path: local_part(want[path], s) for path, s in zip(found, specs[0], strict=True)}
    assert_bitwise_equal(parts(found), cut, "trained parameters")
    assert abs(metrics.loss.item() - losses[-1]) <= 1e-6 * abs(losses[-1]), (metrics.loss, losses)


def in_plain_torch(case):
    """The same run on whole tensors, without this library: parameters by path, and the losses."""
    params = fs.tree.named_leaves(whole_tensors(case.leaves, numbers=True))
    frozen = {path for path, leaf in fs.tree.named_leaves(case.leaves).items() if leaf.frozen}
    trained = [w.requires_grad_() for path, w in params.items() if w.is_floating_point() and path not in frozen]
    momenta, losses = [torch.zeros_like(w) for w in trained], []
    for number in range(case.steps):
        total, weight = case.loss(params, case.batch(number))
        losses.append((total / weight).item())
        grads = torch.autograd.grad(total / weight, trained) if trained else ()
        momenta = [0.5 * m + g for m, g in zip(momenta, grads, strict=True)]
        with torch.no_grad():
            for w, m in zip(trained, momenta, strict=True):
                w -= m / 16
    return {path: w.detach() for path, w in params.items()}, losses


def unit_is_adjoint(leaf, home):
    """`gather_unit` and `scatter_grads` of one leaf, in float64."""
    layout = layout_here({"a": leaf}, home)
    mesh, sharding = layout.mesh, layout.leaves[0].params
    assert not abstract(mesh).ranks
    same = tuple(axis for axis in data_axes(mesh) if axis not in sharding.spec.all_axes)
    local = rank_values(sharding.local_shape(leaf.shape), mesh, same=same)
    nodes = {"a": to_local(sharding.to_dtensor(local, leaf.shape))}
    dual = functools.partial(fs.scatter_grads, like=nodes)
    assert_adjoint(fs.gather_unit, dual, nodes, mesh=mesh, same_in=same, what="gather_unit and scatter_grads")
