"""A GPT of one's own, in the form of GPT-2: trains on bytes, evaluates, and writes text, on two local ranks.

Run it with `python examples/nanogpt.py`. Nothing here is of `fs.models` but the function that generates: `apply` is
called with all tokens so far, and `context` says how many it can take. `fs.models.decoder` keeps keys and values.
"""

import torch
import torch.nn.functional as F

import fsharding as fs

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT, DROPOUT = 256, 64, 4, 2, 32, 0.1
RANKS, STEPS, ROWS = 2, 100, 32


def init(key):
    """Draws of GPT-2: each block is a unit of its own, gathered and let go by itself."""
    keys = iter(fs.random.split(key, 3 + 4 * LAYERS))

    def weight(*shape, std=0.02):
        return fs.random.normal(next(keys), shape, std=std)

    def norm():
        return {"scale": fs.random.ones((WIDTH,)), "shift": fs.random.zeros((WIDTH,))}

    narrow = 0.02 / (2 * LAYERS) ** 0.5
    blocks = [
        {
            "norm1": norm(),
            "qkv": weight(3 * WIDTH, WIDTH),
            "out": weight(WIDTH, WIDTH, std=narrow),
            "norm2": norm(),
            "up": weight(4 * WIDTH, WIDTH),
            "down": weight(WIDTH, 4 * WIDTH, std=narrow),
        }
        for _ in range(LAYERS)
    ]
    embed = {"tokens": weight(VOCAB, WIDTH), "positions": weight(CONTEXT, WIDTH)}
    return {"embed": embed, "blocks": blocks, "head": {"norm": norm(), "unembed": weight(VOCAB, WIDTH)}}


def normed(params, x):
    return F.layer_norm(x, (WIDTH,), params["scale"], params["shift"])


def block(params, x):
    q, k, v = F.linear(normed(params["norm1"], x), params["qkv"]).unflatten(-1, (3, HEADS, -1)).unbind(-3)
    mixed = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), params["out"])
    return x + F.linear(F.gelu(F.linear(normed(params["norm2"], x), params["up"])), params["down"])


def apply(params, tokens, key=None):
    """The logits of each next token: [B, T, V]."""
    embed = fs.gather_unit(params["embed"], next_unit=params["blocks"][0])
    x = F.embedding(tokens, embed["tokens"]) + embed["positions"][: tokens.shape[1]]
    x = fs.random.dropout(x, DROPOUT, key)
    x = fs.scan_units(block, params["blocks"], x, next_unit=params["head"])
    head = fs.gather_unit(params["head"])
    return F.linear(normed(head["norm"], x), head["unembed"])


def loss_fn(params, batch, key=None):
    """The sum of this rank's token losses, and how many; a step gives a key, an evaluation does not."""
    key = None if key is None else fs.random.for_rank(key)
    logits, targets = apply(params, batch["tokens"], key), batch["targets"]
    return fs.Loss(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())


def train():
    """Each rank runs this; it returns the loss on rows that are new, the texts, and how often parameters were sent."""
    data = fs.data.open_data("default", batch_size=ROWS, seq_len=CONTEXT)  # bytes of Python's standard library
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(3e-3, weight_decay=0.1))
    state, step = fs.setup(init, loss_fn, opt, fs.random.key(0), "zero3", donate=True)
    for number in range(STEPS):
        state, metrics = step(state, fs.local_batch(data.batch(number), state.layout.mesh))
        if (number + 1) % 50 == 0:
            fs.print0(f"step {number + 1:3d}  loss {metrics.loss:.3f}", flush=True)
    loss = fs.evaluate(loss_fn)(state, fs.local_batch(data.batch(STEPS), state.layout.mesh)).mean

    prompts = [[*b"import "], [*b"    def "]]
    options = {"key": fs.random.key(1), "temperature": 0.8, "top_k": 40, "context": CONTEXT}
    with fs.debug.count_bytes() as sent:
        tokens = fs.models.generate(apply, state, prompts, 60, **options)
    rows = zip(prompts, tokens.tolist(), strict=True)
    texts = [bytes([*prompt, *row]).decode(errors="replace") for prompt, row in rows]
    whole = fs.unshard(state)
    assert torch.equal(tokens, fs.models.generate(apply, whole, prompts, 60, **options))
    return float(loss), texts, sent.calls


if __name__ == "__main__":
    (loss, texts, calls), other = fs.run_ranks(train, RANKS)
    for text in texts:
        print(repr(text))
    assert (loss, texts, calls) == other
    print(f"loss {loss:.3f} on new rows, and {calls} all-gathers for {len(texts)} texts of 60 tokens")
