"""Moments as codes and scales, and bfloat16 main parameters that are rounded by key: the same bits in every layout."""

import itertools

import pytest
import torch

import fsharding as fs
from fsharding import formats
from fsharding.precision import Precision
from fsharding.sharding.partition_spec import Fused
from fsharding.testing import assert_bitwise_equal, counting_host_reads, run_ranks
from tests.helpers import bits, full, mesh_of
from tests.training import ZEROS, batches

SHAPES = {
    "blocks": {"up": (3, 40, 72), "down": (3, 72, 40), "norm": (3, 40)},
    "experts": (4, 40, 48),
    "head": (96, 52),
    "qkv": (48, 96),
    "vector": (5000,),
}
NAMES = {
    "blocks": {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed"), "norm": ("layers", None)},
    "experts": ("expert", "embed", "mlp"),
    "head": ("vocab", "embed"),
    "qkv": ("embed", Fused("mlp", (48, 24, 24))),
    "vector": (None,),
}
NARROW = Precision(params=torch.bfloat16, grads=torch.float32, moments=formats.MXFP8, rounding="keyed")
FORMATS = {
    "mx": formats.MXFP8,
    "squares": formats.E4M3_128x128,
    "rows": formats.ROWWISE,
    "keyed": formats.MXFP8_E5M2.with_rounding("keyed"),
}
OPTIMIZERS = {
    "adamw": lambda: fs.adamw(1e-2, weight_decay=0.1),
    "lion": lambda: fs.optim.lion(1e-3, weight_decay=0.1),
    "momentum": lambda: fs.sgd(1e-2, momentum=0.9, nesterov=True),
    "groups": lambda: fs.optim.multi_transform(
        {"decayed": fs.adamw(1e-2, weight_decay=0.1), "other": fs.adamw(1e-2)},
        lambda path, _: "other" if "norm" in path else "decayed",
    ),
}
STAGES = {"blocks": [[0, 2], [1]], "head": 1}


def values(seed, scale=1.0):
    leaves, spec = fs.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    generator = torch.Generator().manual_seed(seed)
    return fs.tree.unflatten(spec, [torch.randn(shape, generator=generator) * scale for shape in leaves])


def planned(axes, strategy, precision):
    leaves, spec = fs.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    names = fs.tree.unflatten(spec, [None] * len(leaves)) and NAMES
    model = fs.tree.unflatten(spec, [torch.empty(shape, device="meta") for shape in leaves])
    stages = STAGES if "pp" in axes else None
    return fs.plan_layout(model, mesh_of(axes), strategy=strategy, precision=precision, names=names, stages=stages)


def updated(axes, strategy, precision, name, updates=3):
    """The state after some updates by gradients that are the same on every mesh."""
    layout, opt = planned(axes, strategy, precision), OPTIMIZERS[name]()
    state = fs.init_state(lambda key: values(0, 0.1), opt, fs.random.key(7), layout)
    for i in range(updates):
        grads = fs.shard(values(i + 1, 10.0**-i), layout.main)
        state = fs.update(state, grads, opt)
    memory = layout.memory(opt)
    assert memory.opt_state == fs.state_bytes(state.opt_state), "the plan's bytes are those of the state"
    assert memory.state == fs.state_bytes((state.params, state.main, state.opt_state))
    return state


def whole_state(state):
    whole = fs.unshard(state)
    return {"params": whole.main or whole.params, "opt_state": whole.opt_state}


def states_on(axes, cases):
    """For each case the whole state of zero(0), after all strategies have given the same; and each went there and back."""
    result = []
    for name, precision in cases:
        states = [updated(axes, strategy, precision, name) for strategy in ZEROS]
        first = whole_state(states[0])
        for state, other in zip(states, (*states[1:], states[0]), strict=True):
            assert_bitwise_equal(whole_state(state), first, f"{state.layout.strategy} of {name}")
            there = fs.reshard(state, other.layout)
            assert_bitwise_equal(bits(there.opt_state), bits(other.opt_state), "moved as made")
            assert_bitwise_equal(bits(fs.reshard(there, state.layout)), bits(state), "there and back")
        result.append(first)
    return result


CASES = [
    ("adamw", NARROW),
    ("adamw", Precision(moments=FORMATS["rows"])),
    ("groups", Precision(params=torch.bfloat16, moments=FORMATS["squares"])),
    ("lion", NARROW),
    ("momentum", Precision(moments=FORMATS["keyed"])),
]
MESHES = [{"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"dp": 2, "ep": 2}]
MORE = [{"tp": 4}, {"pp": 2, "dp": 2}, {"ep": 2, "tp": 2}, {"replica": 2, "dp": 2}]
EVERY = [(name, Precision(moments=format)) for name, format in itertools.product(OPTIMIZERS, FORMATS.values())]


@pytest.mark.parametrize(
    ("meshes", "cases"), [(MESHES, CASES), pytest.param([*MESHES, *MORE], [*CASES, *EVERY], marks=full)]
)
def test_states_are_the_same_on_every_mesh(meshes, cases):
    alone = states_on({"dp": 1}, cases)
    for axes in meshes:
        for rank, seen in enumerate(run_ranks(states_on, 4, axes, cases)):
            for case, one, other in zip(cases, alone, seen, strict=True):
                assert_bitwise_equal(other, one, f"{case} on {axes}, rank {rank}")
