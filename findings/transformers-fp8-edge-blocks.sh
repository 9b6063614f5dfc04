#!/usr/bin/env bash
# torch 2.13.0, transformers 5.23.0. An fp8 weight of 48 rows with blocks of 32 has scales for rows 0 to 31 and 32 to
# 47. from_pretrained with dequantize=True ignores the block size of the config: it divides the rows by the number of
# scales, and uses blocks of 24. Rows 24 to 31 get the scale of the next block, without a warning.
# Expected: 32 rows of 1 and 16 of 2 (all quantized values are 1, the scales of the two blocks 1 and 2).
# Seen:
#   48 rows, blocks of 32: 24 rows of 1.0, 24 rows of 2.0
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6 transformers==5.23.0 safetensors==0.8.0 accelerate==1.15.0
run <<'PY'
import json

import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

BLOCK = 32
LlamaForCausalLM(
    LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32,
    )
).save_pretrained("model")
tensors = load_file("model/model.safetensors")
for name, x in list(tensors.items()):
    if "_proj" in name:
        blocks = [-(-n // BLOCK) for n in x.shape]
        tensors[name] = torch.ones(x.shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.arange(1.0, blocks[0] + 1).view(-1, 1).expand(blocks).contiguous()
save_file(tensors, "model/model.safetensors", metadata={"format": "pt"})
fp8 = {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]}
with open("model/config.json") as file:
    config = json.load(file)
with open("model/config.json", "w") as file:
    json.dump({**config, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", **fp8}}, file)
model = LlamaForCausalLM.from_pretrained(
    "model", quantization_config=FineGrainedFP8Config(dequantize=True, **fp8), dtype=torch.float32
)
weight = model.model.layers[0].mlp.up_proj.weight
scales, rows = torch.unique_consecutive(weight[:, 0].detach(), return_counts=True)
print(f"{len(weight)} rows, blocks of {BLOCK}:", ", ".join(f"{n} rows of {s}" for s, n in zip(scales, rows)))
PY
compare
