#!/usr/bin/env bash
# torch 2.13.0, transformers 5.23.0, peft 0.21.2. LoRA on a stack of experts (target_parameters) keeps one A and one B
# for all. Rows of A are ordered by expert, then rank; columns of B by rank, then expert. Slicing both in the same way
# pairs the factors of different experts.
# Expected: one order for both.
# Seen:
#   experts 3, r 2: A (6, 16), B (8, 6)
#   rows of A belong to experts [0, 0, 1, 1, 2, 2]
#   columns of B belong to experts [0, 1, 2, 0, 1, 2]
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 safetensors==0.8.0
run <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM

experts, r = 3, 2
config = MixtralConfig(
    hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=32, num_local_experts=experts,
)
lora = LoraConfig(r=r, target_modules=[], target_parameters=["mlp.experts.down_proj"])
model = get_peft_model(MixtralForCausalLM(config), lora)
(layer,) = (m for m in model.modules() if type(m).__name__ == "ParamWrapper")
A, B = layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data


def expert_of(part):
    """Find the expert whose weight changes if only this part of a factor isn't zero."""
    A.zero_(), B.zero_()
    (B if part[0] is A else A).fill_(1.0)
    part[0][part[1]] = 1.0
    (expert,) = layer.get_delta_weight("default").flatten(1).any(1).nonzero().flatten().tolist()
    return expert


print(f"experts {experts}, r {r}: A {tuple(A.shape)}, B {tuple(B.shape)}")
print("rows of A belong to experts", [expert_of((A, i)) for i in range(experts * r)])
print("columns of B belong to experts", [expert_of((B, (slice(None), i))) for i in range(experts * r)])
PY
compare
