"""A tiny Llama of transformers, fine-tuned on local ranks over any mesh, and loaded back into transformers.

Run `python examples/finetune_llama.py`, or with axes: `python examples/finetune_llama.py pp=2 dp=2 tp=2`, with any of
pp, replica, dp, ep, cp and tp. Weights go from files into the slices of each rank, and back; no rank holds the model.
"""

import math
import sys
import tempfile
from pathlib import Path

import torch

import fsharding as fs

ROWS, LENGTH, STEPS, MICROBATCHES = 16, 32, 12, 2
LLAMA = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def batch_of(step):
    """The global batch of a step: each row counts upwards, modulo 96."""
    starts = torch.randint(96, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    rows = (starts + torch.arange(LENGTH + 1)) % 96
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def mine(batch, mesh):
    """This rank's rows, and its part of the sequence where the mesh has cp."""
    index, count = fs.data_rank_and_size(mesh)
    return fs.ops.cut_sequence({name: x.chunk(count)[index] for name, x in batch.items()}, mesh=mesh)


def finetune(source, target, axes):
    """What each rank runs; returns the loss before each step and at the end, and this rank's bytes of parameters."""
    mesh = fs.make_mesh(**axes)
    config = fs.hf.config_of(source)
    model = fs.models.decoder(config)

    # A pipeline has stages, which own their layers; embedding and head are on one stage each.
    schedule = fs.pipeline.plan_schedule("1f1b", axes["pp"], MICROBATCHES) if axes.get("pp", 1) > 1 else None
    stages = None if schedule is None else fs.pipeline.stages_of(model, schedule)
    layout = fs.plan_layout(model, mesh, strategy=fs.zero(3), stages=stages)

    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(fs.optim.schedules.warmup_cosine(1e-2, 2, STEPS)))
    params = fs.hf.load(source, layout)  # reads this rank's slices
    state = fs.state_from_params(params, opt, fs.random.key(0), layout)
    step = fs.make_train_step(model, opt, microbatches=MICROBATCHES, schedule=schedule or "1f1b")

    losses = []
    for number in range(STEPS):
        state, metrics = step(state, mine(batch_of(number), mesh))
        losses.append(float(metrics.loss))
    _, metrics = step(state, mine(batch_of(STEPS), mesh))  # the loss at the end; the state after it is not kept
    entries = fs.hf.config_json(config, max_position_embeddings=LLAMA["max_position_embeddings"])
    fs.hf.save(target, state, entries)  # writes this rank's boxes
    return [*losses, float(metrics.loss)], layout.memory().params


def loss_of(model, batch):
    """The mean token loss of a model of transformers, on one process."""
    with torch.no_grad():
        logits = model(batch["tokens"]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()))


if __name__ == "__main__":
    import transformers  # here, so that the ranks, which need none of it, do not import it

    transformers.utils.logging.disable_progress_bar()
    axes = {name: int(size) for name, _, size in (text.partition("=") for text in sys.argv[1:])} or {"tp": 2}
    ranks = math.prod(axes.values())

    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA))
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "llama"), Path(folder, "finetuned")
        theirs.save_pretrained(source)
        results = fs.run_ranks(finetune, ranks, source, target, axes)
        tuned = transformers.AutoModelForCausalLM.from_pretrained(target)

    losses = results[0][0]
    total = sum(x.nbytes for x in theirs.parameters())
    print(f"mesh {axes}: {total} bytes of parameters, on each rank {[size for _, size in results]}")
    for name, model, batch, loss in (
        ("before", theirs, batch_of(0), losses[0]),
        ("after", tuned, batch_of(STEPS), losses[-1]),
    ):
        expected = loss_of(model, batch)
        print(f"{name:>6}: loss {loss:.6f} on {ranks} ranks, {expected:.6f} in transformers")
        assert math.isclose(loss, expected, rel_tol=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    print("fine-tuned on the mesh, and the same in transformers")
