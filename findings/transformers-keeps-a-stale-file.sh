#!/usr/bin/env bash
# torch 2.13.0, transformers 5.23.0. save_pretrained into a directory that holds an older save in one file removes old
# shards, but not model.safetensors. from_pretrained takes this file before the new index: it loads the old model.
# Expected: the weights of the last save, which are 2.
# Seen:
#   first save, one file, all weights 1: ['model.safetensors']
#   second save, shards, all weights 2: ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors', 'model.safetensors.index.json']
#   loaded: [1.0]
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6 transformers==5.23.0 safetensors==0.8.0
run <<'PY'
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, tie_word_embeddings=False,
    )
)
for text, value, size in (("first save, one file", 1, "5GB"), ("second save, shards", 2, "6KB")):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    model.save_pretrained("model", max_shard_size=size)
    print(f"{text}, all weights {value}:", sorted(name for name in os.listdir("model") if "safetensors" in name))
loaded = LlamaForCausalLM.from_pretrained("model")
print("loaded:", sorted({value for p in loaded.parameters() for value in p.unique().tolist()}))
PY
compare
