"""Modules with experts on meshes with `ep`: their forward takes all experts, so they are refused by name."""

import pytest
from torch import nn

import fsharding as fs
from fsharding.base.errors import ConfigError
from tests.helpers import refusal, slow
from tests.hf_configs import SIZES

MIXTRAL = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
OLMOE = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}
QWEN2 = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
         "shared_expert_intermediate_size": 8}  # fmt: skip


def built(kind, sizes):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


def mesh(**axes):
    return fs.AbstractMesh(tuple(axes), tuple(axes.values()))


@slow
def test_experts_of_a_family_of_the_decoder_go_there():
    net = fs.functionalize(built("Mixtral", MIXTRAL))
    assert refusal(fs.plan_layout, net, mesh(dp=2, ep=2), kind=ConfigError).splitlines() == [
        "fs.plan_layout cannot shard the experts of this module over ep=2: every rank would gather all of them.",
        "  model.layers.mlp.experts.gate_up_proj is float32[2, 4, 48, 16]",
        "  model.layers.mlp.experts.down_proj is float32[2, 4, 16, 24]",
        "For experts over ep, read the weights of this mixtral into a decoder: "
        "model = fs.models.decoder(fs.hf.config_of(folder)), then fs.hf.load(folder, layout). Or use ep=1.",
    ]
    fs.plan_layout(net, mesh(dp=4, ep=1))


@pytest.mark.parametrize(("kind", "sizes"), [("Olmoe", OLMOE), ("Qwen2Moe", QWEN2)])
def test_experts_of_other_families_need_ep_1(kind, sizes):
    net = fs.functionalize(built(kind, sizes), "model.layers.*")
    text = refusal(fs.plan_layout, net, mesh(dp=2, ep=4), kind=ConfigError)
    assert "experts.down_proj" in text and "shared_expert" not in text
    assert text.endswith("Use ep=1, and dp=8 for these ranks: the module's own forward takes all experts.")


def test_parts_of_a_model_with_experts_are_refused_as_well():
    model = fs.model_from_module(built("Mixtral", MIXTRAL))
    text = refusal(fs.plan_layout, model, mesh(ep=2), kind=ConfigError)
    assert "cannot shard the experts of this module over ep=2" in text


def test_own_experts_are_refused_and_rules_that_leave_them_everywhere_are_not():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            return sum(expert(x) for expert in self.experts)

    net = fs.functionalize(Routed(), ())
    assert "experts.1.bias is float32[4]" in refusal(fs.plan_layout, net, mesh(ep=2), kind=ConfigError)
    rules = fs.AxisRules(**{**fs.DEFAULT_RULES, "expert": None})
    fs.plan_layout(net, mesh(ep=2), rules)


def test_dense_modules_have_ep_as_one_more_data_axis():
    layout = fs.plan_layout(fs.functionalize(nn.Linear(4, 4), ()), mesh(dp=2, ep=2))
    assert layout.main["weight"].data_axes == layout.main["bias"].data_axes == ("dp", "ep")
