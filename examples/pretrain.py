"""Pretrains a decoder of GPT-2's size by the recipe of nanoGPT (github.com/karpathy/nanoGPT, config/train_gpt2.py).

`python examples/pretrain.py` trains a small one on two local ranks, and beside it in a plain loop of torch on one
process, and compares the two curves. The whole recipe, with 124 million parameters, on any mesh of eight GPUs:

    torchrun --nproc-per-node 8 examples/pretrain.py --preset gpt2 --data train.bin --mesh dp=4,tp=2 --out runs/gpt2
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import fsharding as fs


@dataclass(frozen=True)
class Recipe:
    model: fs.models.DecoderConfig
    rows: int  # of the global batch
    length: int
    microbatches: int
    steps: int
    warmup: int
    peak: float
    precision: fs.Precision

    @property
    def rate(self) -> Any:
        return fs.optim.schedules.warmup_cosine(self.peak, self.warmup, self.steps, end=self.peak / 10)


RECIPES = {
    "small": Recipe(
        fs.models.DecoderConfig(vocab_size=256, dim=48, kv_heads=4, intermediate_size=128, tied=True),
        rows=16, length=64, microbatches=2, steps=24, warmup=4, peak=3e-3, precision=fs.FP32,
    ),
    # As many parameters as GPT-2 in each block, in the form of Llama: gated, with rotary positions, without biases.
    "gpt2": Recipe(
        fs.models.DecoderConfig(50304, dim=768, layers=12, heads=12, kv_heads=12, intermediate_size=2048, tied=True),
        rows=480, length=1024, microbatches=5, steps=600_000, warmup=2000, peak=6e-4, precision=fs.BF16,
    ),
}  # fmt: skip
DECAY, B1, B2, CLIP = 0.1, 0.9, 0.95, 1.0


@dataclass(frozen=True)
class Config:
    preset: Literal["small", "gpt2"] = "small"
    data: str = "default"  # the bytes of Python's own source; or a .bin file of token ids, as nanoGPT writes it
    mesh: str = "dp=-1"
    strategy: str = "zero3"
    out: Path | None = None
    every: int = 500  # steps from one evaluation and checkpoint to the next

    def axes(self) -> dict[str, int]:
        return {axis: int(size) for axis, _, size in (part.partition("=") for part in self.mesh.split(","))}

    def tokens(self) -> Any:
        recipe = RECIPES[self.preset]
        return fs.data.open_data(self.data, batch_size=recipe.rows, seq_len=recipe.length)


def train(config: Config) -> tuple[list[float], Any]:
    """What each rank runs: the losses, and of the small model the whole weights at the end."""
    recipe, data, mesh = RECIPES[config.preset], config.tokens(), fs.make_mesh(**config.axes())
    model, options = fs.models.decoder(recipe.model), {"microbatches": recipe.microbatches}
    decays = {"decay": DECAY, "no_decay": 0.0}
    groups = {name: fs.adamw(recipe.rate, b1=B1, b2=B2, weight_decay=decay) for name, decay in decays.items()}
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(CLIP), fs.optim.multi_transform(groups, fs.optim.no_decay))
    start = fs.random.key(0), config.strategy
    state, step = fs.setup(model, None, opt, *start, mesh=mesh, precision=recipe.precision, donate=True, **options)
    evaluate = fs.evaluate(model, **options)

    def batch_of(number):
        """This rank's rows of a batch, and where the mesh has cp its part of each. It follows from its number alone."""
        return fs.local_batch(data.batch(number), mesh)

    saver = fs.checkpoint.Checkpointer(config.out, every=config.every) if config.out else None
    if saver is not None and saver.latest() is not None:
        state = saver.load(state.layout, opt=opt)
    losses = []
    for number in range(int(state.step), recipe.steps):
        state, metrics = step(state, batch_of(number))
        losses.append(float(metrics.loss))
        if saver is not None:
            saver.after_step(state, {"model": fs.hf.config_json(recipe.model)})  # `fsharding generate` reads it
        if (number + 1) % config.every == 0:
            validation = evaluate(state, batch_of(recipe.steps + number))
            fs.print0(f"step {number + 1}: loss {losses[-1]:.4f}, on new rows {validation.mean:.4f}", flush=True)
    if saver is not None:
        saver.close()
    return losses, fs.unshard(state).params if config.preset == "small" else None


def train_plainly(config: Config) -> tuple[list[float], Any]:
    """The same on one process, with whole tensors, in a plain loop of torch."""
    recipe, data = RECIPES[config.preset], config.tokens()
    model = fs.models.decoder(recipe.model)
    draws = model.init(fs.random.split(fs.random.key(0))[0])  # of the key's two halves the run has the other
    params = fs.tree.map(lambda draw: draw.tensor().requires_grad_(), draws)
    named = fs.tree.named_leaves(params)
    # Blocks are stacked, so that their vectors have two dims.
    matrices, vectors = (
        [x for path, x in named.items() if (x.ndim == 1 + path.startswith("blocks.")) == is_vector]
        for is_vector in (False, True)
    )
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    opt, losses = torch.optim.AdamW(groups, betas=(B1, B2)), []
    for number in range(recipe.steps):
        batch = data.batch(number)
        x = model.embed(params["embed"], batch)
        for i in range(recipe.model.layers):
            x = model.block(fs.tree.map(lambda stack: stack[i], params["blocks"]), x)  # noqa: B023
        total, count = model.head({**params["head"], "unembed": params["embed"]["table"]}, x, batch)
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), CLIP)
        for group in opt.param_groups:
            group["lr"] = recipe.rate(number)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, params


if __name__ == "__main__":
    config = tyro.cli(Config)
    if "RANK" in os.environ or config.preset == "gpt2":
        train(config)
    else:
        ranks = math.prod(abs(size) + (size < 0) for size in config.axes().values())  # -1 is two
        (ours, last), (plain, whole) = fs.run_ranks(train, ranks, config)[0], train_plainly(config)
        for number in (0, 8, 16, 23):
            print(f"step {number:2d}  loss {ours[number]:.5f} on {ranks} ranks, {plain[number]:.5f} in a plain loop")
        assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(ours, plain, strict=True))
        fs.testing.assert_trees_close(last, fs.tree.map(torch.Tensor.detach, whole), atol=3e-4)
        print("the curves are equal to rounding")
