"""Published models by name: their numbers of parameters, and plans for thousands of ranks without memory."""

import math
import time

import pytest

import fsharding as fs
from fsharding.errors import ConfigError
from fsharding.recipes import RECIPES, recipe

PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen2_5_72b": 72_706_203_648,
    "mixtral_8x7b": 46_702_792_704,
    "deepseek_v3": 671_026_419_200,
}
MESHES = {
    "mixtral_8x7b": {"pp": 8, "dp": 32, "ep": 8, "tp": 4},
    "deepseek_v3": {"pp": 16, "dp": 4, "ep": 64, "tp": 2},
}


def count(shapes):
    return sum(math.prod(leaf.shape) for leaf in fs.tree.leaves(shapes))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_parameters_and_a_plan(name):
    began, model = time.perf_counter(), recipe(name).model()
    assert count(model.init(fs.random.key(0))) == PUBLISHED[name]
    axes = MESHES.get(name, {"pp": 8, "dp": 32, "tp": 8})
    schedule, mesh = fs.plan_schedule("1f1b", axes["pp"], 16), fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    layout = fs.plan_layout(model, mesh, stages=fs.stages_of(model, schedule))
    last = {axis: size - 1 for axis, size in axes.items()}
    held = [layout.memory(coord={**last, "pp": pp}).params for pp in range(axes["pp"])]
    ranks = math.prod(axes.values()) / axes["pp"]
    assert 0.99 < sum(held) / (4 * PUBLISHED[name] / ranks) < 1.01, "every parameter is on one rank, but for small ones"
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("tiny")])
def test_twins_are_small_and_take_bytes(name):
    config = recipe(name).config
    assert config.vocab == 256 and 1e5 < count(recipe(name).model().init(fs.random.key(0))) < 3e6


def test_names():
    assert recipe("llama3-8b") is recipe("llama3_8b") is RECIPES["llama3_8b"]
    assert recipe("qwen2.5-72b") is RECIPES["qwen2_5_72b"] and recipe("bench_34m") is RECIPES["bench-34m"]
    assert fs.recipes.llama3_8b() == RECIPES["llama3_8b"]
    with pytest.raises(ConfigError, match=r"knows no preset 'lama3_8b'\.\nPresets are .*Did you mean 'llama3_8b'\?"):
        recipe("lama3_8b")
