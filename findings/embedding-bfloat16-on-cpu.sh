#!/usr/bin/env bash
# torch 2.13.0, CPU. Gradients of an embedding in bfloat16 are added row by row in bfloat16, where 256 + 1 is 256. A
# token that occurs 1000 times with a gradient of ones gets 256. Indexing and embedding_bag do the same; index_select and a product
# with one-hot rows are right.
# Expected: 1000 from each of the five.
# Seen:
#   F.embedding(i, w) 256.0
#   w[i] 256.0
#   F.embedding_bag(i, w) 256.0
#   w.index_select(0, i) 1000.0
#   one_hot(i) @ w 1000.0
set -euo pipefail
source "$(dirname "$0")/env.sh"
packages torch==2.13.0 numpy==2.4.6
run <<'PY'
import torch
from torch.nn import functional as F

w = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
i = torch.zeros(1000, dtype=torch.long)
for name, rows in {
    "F.embedding(i, w)": F.embedding(i, w),
    "w[i]": w[i],
    "F.embedding_bag(i, w)": F.embedding_bag(i[:, None], w, mode="sum"),
    "w.index_select(0, i)": w.index_select(0, i),
    "one_hot(i) @ w": F.one_hot(i, 2).bfloat16() @ w,
}.items():
    print(name, torch.autograd.grad(rows.sum(), w)[0][0, 0].item())
PY
compare
