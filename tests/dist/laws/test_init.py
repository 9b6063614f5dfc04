"""Law: initial values do not depend on the layout, bit for bit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.testing import assert_bitwise_equal, run_ranks, strategies
from tests.helpers import examples, full, mesh_of, whole
from tests.laws import init_is_part_of_the_whole
from tests.training import DP, HYBRIDS, MODEL, OUTER, ZEROS, optimizer


def initial(strategy, axes, precision):
    mesh = mesh_of(axes)
    opt = optimizer("adamw")
    state = fs.init_state(
        MODEL, opt, fs.random.key(7), fs.plan_layout(MODEL, mesh, strategy=strategy, precision=precision)
    )
    return whole(state.main if state.main is not None else state.params), whole(state.params), state.key


@full
@pytest.mark.parametrize("precision", [fs.FP32, fs.BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_init_is_the_same_in_every_layout(ranks, precision):
    init_key, run_key = fs.random.split(fs.random.key(7)).unbind(0)
    draws = {path: draw.tensor() for path, draw in fs.tree.named_leaves(MODEL.init(init_key)).items()}
    levels = [*ZEROS, *(HYBRIDS if ranks == 4 else [])]
    for strategy in levels:
        axes = OUTER if strategy in HYBRIDS and ranks == 4 else DP
        for main, params, key in run_ranks(initial, ranks, strategy, axes, precision):
            assert_bitwise_equal(main, draws, str(strategy))
            held = {path: x.to(params[path].dtype) for path, x in draws.items()}
            assert_bitwise_equal(params, held, str(strategy))
            assert_bitwise_equal(key, run_key)


@examples(50, 200)
@given(st.data())
def test_init_is_the_same_in_any_layout(data):
    leaves, mesh = data.draw(strategies.trees()), data.draw(strategies.meshes())
    run_ranks(init_is_part_of_the_whole, mesh.size, leaves, data.draw(strategies.homes(leaves, mesh)))
