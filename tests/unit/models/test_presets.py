"""Published models by name: their numbers of parameters, and plans for thousands of ranks without memory."""

import json
import math

import pytest

import fsharding as fs
from fsharding.apps.cli.main import main
from fsharding.base.errors import ConfigError
from fsharding.models.presets import RECIPES, recipe

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
    model = recipe(name).model()
    assert count(model.init(fs.random.key(0))) == PUBLISHED[name]
    axes = MESHES.get(name, {"pp": 8, "dp": 32, "tp": 8})
    schedule, mesh = (
        fs.pipeline.plan_schedule("1f1b", axes["pp"], 16),
        fs.AbstractMesh(tuple(axes), tuple(axes.values())),
    )
    layout = fs.plan_layout(model, mesh, stages=fs.pipeline.stages_of(model, schedule))
    last = {axis: size - 1 for axis, size in axes.items()}
    held = [layout.memory(coord={**last, "pp": pp}).params for pp in range(axes["pp"])]
    ranks = math.prod(axes.values()) / axes["pp"]
    assert 0.99 < sum(held) / (4 * PUBLISHED[name] / ranks) < 1.01, "every parameter is on one rank, but for small ones"


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("tiny")])
def test_twins_are_small_and_take_bytes(name):
    config = recipe(name).config
    assert config.vocab_size == 256 and 1e5 < count(recipe(name).model().init(fs.random.key(0))) < 3e6


def test_names():
    assert recipe("llama3-8b") is recipe("llama3_8b") is RECIPES["llama3_8b"]
    assert recipe("qwen2.5-72b") is RECIPES["qwen2_5_72b"] and recipe("bench_34m") is RECIPES["bench-34m"]
    assert fs.models.presets.llama3_8b() == RECIPES["llama3_8b"]
    with pytest.raises(ConfigError, match=r"has no preset 'lama3_8b'\.\nPresets are .*Did you mean 'llama3_8b'\?"):
        recipe("lama3_8b")


def planned(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(["plan", *args])
    out, err = capsys.readouterr()
    return end.value.code, out, err


def test_the_verb_plan_shows_bytes_by_stage(capsys):
    status, out, _ = planned(capsys, "deepseek-v3", "--mesh", "pp=16,dp=4,ep=64,tp=2")
    lines = out.splitlines()
    assert status == 0 and len(lines) == 3 + 16
    assert lines[0] == "deepseek-v3: 671,026,419,200 parameters in 32 leaves"
    assert lines[1].startswith("8,192 ranks (pp=16, dp=4, ep=64, tp=2), zero3, bfloat16")
    assert lines[2].split() == ["pp", "layers", "params", "main", "grads", "opt_state", "total"]
    assert lines[3].split()[:5] == ["0", "3", "+", "0", "0.021"]
    status, out, _ = planned(capsys, "tiny-moe", "--dtype", "float32", "--strategy", "zero0", "--json")
    found = json.loads(out)
    assert found["stages"][0]["layers"] == [4] and found["ranks"] == 1
    assert found["stages"][0]["bytes"]["params"] == 4 * found["parameters"]


def test_the_verb_plan_refuses_what_cannot_be(capsys):
    assert "knows no preset 'llama9'" in planned(capsys, "llama9")[2]
    assert "knows no --dtype 'int8'" in planned(capsys, "tiny", "--dtype", "int8")[2]
    assert "knows no --schedule 'zvb'" in planned(capsys, "tiny", "--schedule", "zvb")[2]
    assert "--microbatches 0: at least 1" in planned(capsys, "tiny", "--microbatches", "0")[2]
    status, _, err = planned(capsys, "llama3_8b", "--mesh", "tp=3")
    assert status == 2 and "32 heads: not a multiple of tp=3" in err


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ("tpp=8", "got an unknown axis 'tpp'."),
        ("foo=3,dp=2", "got an unknown axis 'foo'."),
        ("tp=0", "got tp=0.\nA size is at least 1"),
        ("pp=-2,tp=2", "got pp=-2.\nA size is at least 1"),
        ("dp=0", "got dp=0.\nA size is at least 1"),
        ("dp=-1", "got dp=-1.\nWrite the size of each axis"),
    ],
)
def test_the_verb_plan_refuses_what_is_no_mesh(capsys, mesh, text):
    status, out, err = planned(capsys, "tiny", "--mesh", mesh)
    assert status == 2 and not out and err.startswith(f"MeshError: fsharding plan --mesh {mesh} {text}")
