"""Megatron checkpoints that torch's own DCP writes, from a plain model: nothing of the library's names or writer is used.

The format is that of NVIDIA/Megatron-LM: `megatron/core/dist_checkpointing/strategies/{torch,common}.py`,
`dist_checkpointing/core.py`, `transformer/{attention,mlp,transformer_block,fsdp_dtensor_checkpoint}.py`,
`transformer/moe/experts.py`, `optimizer/optimizer.py`.
"""

import argparse
import json
import warnings

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

SIZES = {"vocab_size": 40, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 12}
HEAD_DIM = 4


class Pieces(torch.Tensor):
    """A tensor of which DCP writes pieces, as ranks of tensor and pipeline parallelism have them."""

    @staticmethod
    def __new__(cls, whole, cuts):
        self = whole.contiguous().as_subclass(cls)
        self.whole, self.chunks = whole, [((0,) * whole.ndim, tuple(whole.shape))]
        for dim, count in cuts:
            self.chunks = [one for offset, size in self.chunks for one in cls._cut(offset, size, dim, count)]
        return self

    @staticmethod
    def _cut(offset, size, dim, count):
        width = size[dim] // count
        assert width * count == size[dim]
        for k in range(count):
            start = offset[dim] + k * width
            yield (*offset[:dim], start, *offset[dim + 1 :]), (*size[:dim], width, *size[dim + 1 :])

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in self.chunks]

    def __create_write_items__(self, fqn, _):
        properties = TensorProperties.create_from_tensor(self.whole)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets, k), WriteItemType.SHARD, None,
                TensorWriteData(chunk, properties, self.whole.shape),
            )
            for k, chunk in enumerate(self.__create_chunk_list__())
        ]  # fmt: skip

    def __get_tensor_shard__(self, index):
        offset, size = self.chunks[index.index]
        return self.whole[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))].clone()


def layers_of(seed, experts=0):
    """A plain model: what every layer has in the layout of `nn.Linear`, and its ends."""
    generator = torch.Generator().manual_seed(seed)
    d, f, kv = SIZES["dim"], SIZES["intermediate_size"], SIZES["kv_heads"] * HEAD_DIM

    def draw(*shape):
        return 0.3 * torch.randn(shape, generator=generator)

    def layer():
        own = {
            "norm1": 1 + draw(d),
            "norm2": 1 + draw(d),
            "q": draw(d, d),
            "k": draw(kv, d),
            "v": draw(kv, d),
            "o": draw(d, d),
        }
        if experts:
            more = {
                "router": draw(experts, d),
                "gate": draw(experts, f, d),
                "up": draw(experts, f, d),
                "down": draw(experts, d, f),
            }
        else:
            more = {"gate": draw(f, d), "up": draw(f, d), "down": draw(d, f)}
        return own | more

    ends = {"embed": draw(SIZES["vocab_size"], d), "norm": 1 + draw(d), "head": draw(SIZES["vocab_size"], d)}
    return {"layers": [layer() for _ in range(SIZES["layers"])], **ends}


def fused_qkv(layer):
    """Queries of a group, its key, its value, and so on."""
    per = SIZES["heads"] // SIZES["kv_heads"] * HEAD_DIM
    rows = []
    for g in range(SIZES["kv_heads"]):
        rows += [layer["q"][g * per : (g + 1) * per]]
        rows += [layer[name][g * HEAD_DIM : (g + 1) * HEAD_DIM] for name in "kv"]
    return torch.cat(rows)


def padded(x):
    return torch.cat([x, torch.full((128 - len(x), x.shape[1]), 9.0)])


def core_tensors(model, *, stacked=True, fused_norms=True):
    """Tensors of torch_dist by name, each with the cuts of tp = 2 and pp = 2."""
    result = {
        "embedding.word_embeddings.weight": (padded(model["embed"]), [(0, 2)]),
        "output_layer.weight": (padded(model["head"]), [(0, 2)]),
        "decoder.final_layernorm.weight": (model["norm"], []),
    }
    by_name = {}
    for layer in model["layers"]:
        dense = "router" not in layer
        norm2 = "mlp.linear_fc1.layer_norm_weight" if fused_norms and dense else "pre_mlp_layernorm.weight"
        norm1 = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
        own = {
            norm1: (layer["norm1"], []),
            norm2: (layer["norm2"], []),
            "self_attention.linear_qkv.weight": (fused_qkv(layer), [(0, 2)]),
            "self_attention.linear_proj.weight": (layer["o"], [(1, 2)]),
        }
        fc1 = torch.cat([layer["gate"], layer["up"]], -2)
        if dense:  # tp cuts both halves
            own |= {"mlp.linear_fc1.weight": (fc1, [(0, 4)]), "mlp.linear_fc2.weight": (layer["down"], [(1, 2)])}
        else:
            own["mlp.router.weight"] = (layer["router"], [])
            own["mlp.experts.experts.linear_fc1.weight"] = (fc1, [(0, 2), (1, 4)])
            own["mlp.experts.experts.linear_fc2.weight"] = (layer["down"], [(0, 2), (2, 2)])
        for name, value in own.items():
            by_name.setdefault(name, []).append(value)
    for name, values in by_name.items():
        if stacked:
            cuts = [(0, len(values))] + [(dim + 1, count) for dim, count in values[0][1]]
            result[f"decoder.layers.{name}"] = torch.stack([x for x, _ in values]), cuts
        else:
            result |= {f"decoder.layers.{i}.{name}": value for i, value in enumerate(values)}
    return result


def store(folder, state):
    """One process writes; torch warns that it is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)  # as Megatron Core does
        dcp.save(state, checkpoint_id=str(folder), no_dist=True, planner=planner)


def write_core(folder, model, moments=(), *, args=None, beside=True, **options):
    """A torch_dist directory; `moments` are models that hold the first and the second ones.

    `beside=False` puts what is in `common.pt` among the tensors, as Megatron Core 0.19 does.
    """
    state = core_tensors(model, **options)
    for kind, values in zip(("exp_avg", "exp_avg_sq"), moments, strict=False):
        state |= {f"optimizer.state.{kind}.{name}": x for name, x in core_tensors(values, **options).items()}
    written = {name: Pieces(x, cuts) for name, (x, cuts) in state.items()}
    common = {"iteration": 7, "checkpoint_version": 3.0, "args": argparse.Namespace(**(args or {}))}
    more = {} if beside else {"common_state/shard_0_1": [common]}
    store(folder, {**written, "rng_state/shard_0.0_1.1": "bytes", **more})
    if beside:
        torch.save(common, folder / "common.pt")
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps({**said, "common_backend_version": 1}))
    return folder


def write_fsdp(folder, model, moments=(), *, args=None):
    """A fsdp_dtensor directory, of rows on two ranks."""
    state = {}
    for kind, values in zip(("", "exp_avg", "exp_avg_sq"), (model, *moments), strict=False):
        for name, (x, _) in core_tensors(values, stacked=False).items():
            parts = {name: x}
            if name.endswith("experts.experts.linear_fc1.weight"):
                base = name.replace("experts.experts", "experts")
                parts = {
                    f"{base}{e}_{s}": y for e, one in enumerate(x) for s, y in zip("wv", one.chunk(2), strict=True)
                }
            elif name.endswith("experts.experts.linear_fc2.weight"):
                base = name.replace("experts.experts", "experts")
                parts = {f"{base}{e}": one for e, one in enumerate(x)}
            elif name.endswith("linear_fc1.weight"):
                parts = {f"{name}_{s}": y for s, y in zip("wv", x.chunk(2), strict=True)}
            for part, y in parts.items():
                full = f"optimizer.state.module.module.module.{part}.{kind}" if kind else f"model.module.{part}"
                state[full] = Pieces(y.contiguous(), [(0, 2)])
    said = argparse.Namespace(**(args or {}))
    store(folder, {**state, "iteration": 7, "optimizer.param_groups.0.lr": 0.1, "args": said})
    return folder


def loss_of(model, tokens):
    """The mean loss of a Llama, by plain torch."""
    x = model["embed"][tokens[:, :-1]]
    B, T, D = x.shape
    angles = torch.arange(T)[:, None] * 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    for layer in model["layers"]:
        y = norm(x, layer["norm1"])
        q, k, v = (F.linear(y, layer[n]).view(B, T, -1, HEAD_DIM).transpose(1, 2) for n in "qkv")
        k, v = (z.repeat_interleave(SIZES["heads"] // SIZES["kv_heads"], 1) for z in (k, v))
        out = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + F.linear(out.transpose(1, 2).reshape(B, T, D), layer["o"])
        y = norm(x, layer["norm2"])
        x = x + F.linear(F.silu(F.linear(y, layer["gate"])) * F.linear(y, layer["up"]), layer["down"])
    return F.cross_entropy(F.linear(norm(x, model["norm"]), model["head"]).flatten(0, 1), tokens[:, 1:].flatten())


def tree_of(model):
    """The parameters as `models.decoder` has them."""

    def stack(name, turn=False):
        x = torch.stack([layer[name] for layer in model["layers"]])
        return x.mT.contiguous() if turn else x

    names = {"norm1": "norm1", "norm2": "norm2", "wq": "q", "wk": "k", "wv": "v"}
    blocks = {ours: stack(theirs) for ours, theirs in names.items()} | {"wo": stack("o", turn=True)}
    feed = {"gate": stack("gate"), "up": stack("up"), "down": stack("down", turn=True)}
    routed = "router" in model["layers"][0]
    blocks |= {"experts": {**feed, "router": stack("router")}} if routed else feed
    return {
        "embed": {"table": model["embed"]},
        "blocks": blocks,
        "head": {"norm": model["norm"], "unembed": model["head"]},
    }
