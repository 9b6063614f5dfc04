"""Fine-tunes low-rank adapters (Hu et al. 2021) of a Hugging Face directory, and writes one that transformers loads.

`python examples/finetune_lora.py` makes a tiny Llama and takes two local ranks. With a directory of yours, under a
launcher: `torchrun --nproc-per-node 8 examples/finetune_lora.py path/to/llama path/to/tuned`. The base stays frozen and
is cut over the ranks; only the adapters have gradients and optimizer state.
"""

import math
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.tensor import distribute_tensor

import fsharding as fs

ROWS, LENGTH, STEPS, RANK, SCALE = 16, 32, 40, 4, 2.0
ADAPTED = ("wq", "wk", "wv", "wo", "gate", "up", "down")  # stacks [layers, out, in]


def batch_of(number, mesh):
    """This rank's rows of a batch in which tokens count upwards; put your own data here."""
    starts = fs.random.uniform(fs.random.fold_in(fs.random.key(1), number), (ROWS, 1), high=96).tensor().long()
    rows = (starts + torch.arange(LENGTH + 1)) % 96
    return fs.local_batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, mesh)


def with_adapters(base):
    """The model whose blocks have two trees, the base and the adapters; a unit gathers both of one layer."""

    def init_adapters(key):
        blocks = base.init(key)["blocks"]
        keys = dict(zip(ADAPTED, fs.random.split(key, len(ADAPTED)), strict=True))
        return {
            name: {
                "down": fs.random.normal(keys[name], (layers, RANK, fan_in), std=fan_in**-0.5),
                "up": fs.random.zeros((layers, fan_out, RANK)),  # so that the first step begins at the base
            }
            for name, (layers, fan_out, fan_in) in ((name, blocks[name].shape) for name in ADAPTED)
        }

    def init(key):
        whole = base.init(key)
        return {**whole, "blocks": {"base": whole["blocks"], "lora": init_adapters(key)}}

    def block(params, x):
        changed = {
            name: params["base"][name] + SCALE * lora["up"] @ lora["down"] for name, lora in params["lora"].items()
        }
        return base.block({**params["base"], **changed}, x)

    thin = {"down": ("layers", None, "embed"), "up": ("layers", "embed", None)}
    names = {**base.names, "blocks": {"base": base.names["blocks"], "lora": dict.fromkeys(ADAPTED, thin)}}
    return base._replace(init=init, block=block, names=names)


def merged(params):
    """The base with the adapters added. Leaves are DTensors, so this is plain torch, one whole change at a time."""
    blocks = dict(params["blocks"]["base"])
    for name, lora in params["blocks"]["lora"].items():
        change, w = SCALE * fs.unshard(lora["up"]) @ fs.unshard(lora["down"]), blocks[name]
        blocks[name] = w + distribute_tensor(change, w.device_mesh, w.placements, src_data_rank=None)
    return {**params, "blocks": blocks}


def finetune(source, target):
    """What each rank runs: the loss on new rows before and after, and bytes of parameters and optimizer state here."""
    mesh, config, opt = fs.make_mesh(dp=-1), fs.hf.config_of(source), fs.adamw(1e-2)
    base = fs.models.decoder(config)
    model = with_adapters(base)
    frozen = ("embed", "head", "blocks.base")
    state, step = fs.setup(model, None, opt, fs.random.key(0), mesh=mesh, frozen=frozen)

    # Each rank reads its slices; both layouts cut the base alike.
    weights = fs.hf.load(source, fs.plan_layout(base, mesh))
    blocks = {"base": weights["blocks"], "lora": state.params["blocks"]["lora"]}
    state = state.replace(params={**weights, "blocks": blocks})

    evaluate, losses = fs.evaluate(model), []
    losses.append(float(evaluate(state, batch_of(1000, mesh)).mean))
    for number in range(STEPS):
        state, metrics = step(state, batch_of(number, mesh))
        if number % 10 == 9:
            fs.print0(f"step {number + 1}: loss {metrics.loss:.4f}", flush=True)
    losses.append(float(evaluate(state, batch_of(1000, mesh)).mean))
    fs.hf.save(target, merged(state.params), config)
    return losses, fs.debug.state_bytes(state.params), fs.debug.state_bytes(state.opt_state)


def loss_in_transformers(path):
    import transformers  # here, so that ranks do not import it

    model, batch = (
        transformers.AutoModelForCausalLM.from_pretrained(path),
        batch_of(1000, fs.AbstractMesh(("dp",), (1,))),
    )
    with torch.no_grad():
        logits = model(batch["tokens"]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()))


def make_llama(path):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(path)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        fs.print0(finetune(*sys.argv[1:]))
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "llama"), Path(folder, "tuned")
        make_llama(source)
        losses, params, moments = fs.run_ranks(finetune, 2, source, target)[0]
        expected = [loss_in_transformers(path) for path in (source, target)]
    for when, loss, theirs in zip(("before", "after"), losses, expected, strict=True):
        print(f"{when:>6}: loss {loss:.5f} on two ranks, {theirs:.5f} in transformers")
        assert math.isclose(loss, theirs, rel_tol=1e-4)
    print(f"{params} bytes of parameters a rank, {moments} bytes of optimizer state")
    assert losses[1] < 0.9 * losses[0] and moments < params / 2
    print("the tuned directory loads in transformers, with the adapters in its weights")
