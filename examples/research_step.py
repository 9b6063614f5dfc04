"""A train step of the decoder with nothing hidden, on two local ranks, under three strategies.

Run it with `python examples/research_step.py`. `fs.make_train_step` is made of the same public pieces.
"""

import torch

import fsharding as fs

RANKS, STEPS, BATCH, LENGTH = 2, 5, 8, 32
CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=64, layers=4, heads=4, kv_heads=2, intermediate_size=160)


def batch_of(step, index, count):
    """This rank's rows of a global batch that follows from the step alone: every row counts upwards, modulo 64."""
    key = fs.random.fold_in(fs.random.key(1), step)
    starts = fs.random.uniform(key, (BATCH, 1), high=64).tensor().long()
    rows = (starts + torch.arange(LENGTH + 1)) % 64
    mine = rows.chunk(count)[index]
    return {"tokens": mine[:, :-1], "targets": mine[:, 1:]}


def train(strategy):
    """What each rank runs; returns what rank 0 prints."""
    # Where everything lives: values, made before any parameter exists.
    mesh = fs.make_mesh(dp=-1)
    model = fs.models.decoder(CONFIG)
    layout = fs.plan_layout(model, mesh, fs.DEFAULT_RULES, strategy)
    rate = fs.optim.schedules.warmup_cosine(1e-2, 2, STEPS)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0), fs.adamw(rate, weight_decay=0.1))

    # The state: each rank draws its own slices of one global draw.
    state = fs.init_state(model, opt, fs.random.key(0), layout)
    params, opt_state = state.params, state.opt_state

    def loss_fn(params, batch):
        """The sum of this rank's token losses, and the number of its tokens. Gathers one unit at a time."""
        blocks = params["blocks"]
        x = model.embed(fs.gather_unit(params["embed"], next_unit=fs.select_unit(blocks, 0)), batch)
        x = fs.scan_units(model.block, blocks, x, policy=fs.policies.save_except_gathered, next_unit=params["head"])
        return model.head(fs.gather_unit(params["head"]), x, batch)

    # Gradients come back reduced, cut as the optimizer's moments are.
    loss_and_grad = fs.value_and_grad(loss_fn, grads=layout.main)

    lines, losses = [], []
    for step in range(STEPS):
        batch = batch_of(step, *fs.data_rank_and_size(mesh))
        with fs.debug.record_collectives() as calls:
            (loss, tokens), grads = loss_and_grad(params, batch)
        norm = fs.global_norm(grads)
        updates, opt_state = opt.update(grads, opt_state, params)
        params = fs.optim.apply_updates(params, updates)

        counts, size = calls[0], fs.debug.state_bytes((params, opt_state))
        losses.append(float(loss))
        lines.append(
            f"step {step}  loss {float(loss):.6f}  norm {float(norm):.4f}  tokens {int(tokens)}  bytes {size}"
            f"  gathers {len(counts.gathers)}  reductions {len(counts.reductions)}  units alive {counts.peak_units}"
        )
    leaf = params["blocks"]["wq"]
    lines.append("bytes: parameters and optimizer state of this rank; gathers and reductions: of one step, by unit")
    lines.append(f"params.blocks.wq is {fs.typeof(leaf)}, here {list(leaf.to_local().shape)}")
    return lines, losses


if __name__ == "__main__":
    seen = []
    for level in (0, 1, 3):
        lines, losses = fs.run_ranks(train, RANKS, fs.zero(level))[0]
        print(f"zero({level}) on {RANKS} ranks", *lines, sep="\n  ")
        seen.append(losses)
    assert seen[0][-1] < seen[0][0]
    assert seen[0] == seen[1] == seen[2]
    print("the losses of all three are equal in every bit")
