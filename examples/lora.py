"""Low-rank adapters (Hu et al. 2021) on a frozen decoder, on two local ranks: only the adapters have optimizer state.

Run it with `python examples/lora.py`. The base is cut over the ranks all the same, and gathered one block at a time.
"""

import torch

import fsharding as fs

RANKS, PRETRAINING, STEPS, BATCH, LENGTH, RANK = 2, 20, 20, 8, 32, 4
CONFIG = fs.models.DecoderConfig(vocab_size=64, dim=64, layers=3, heads=4, kv_heads=2, intermediate_size=160)
BASE = fs.models.decoder(CONFIG)
ADAPTED = ("wq", "wv")  # [layers, out, in]


def init_adapters(key):
    """Two thin matrices for each that is adapted; the second is zero, so that the first step begins at the base."""
    shapes = {name: BASE.init(key)["blocks"][name].shape for name in ADAPTED}
    keys = fs.random.split(key, len(shapes)).unbind(0)
    return {
        name: {
            "down": fs.random.normal(k, (layers, RANK, fan_in), std=fan_in**-0.5),
            "up": fs.random.zeros((layers, fan_out, RANK)),
        }
        for k, (name, (layers, fan_out, fan_in)) in zip(keys, shapes.items(), strict=True)
    }


def init(key):
    return {**BASE.init(key), "blocks": {"base": BASE.init(key)["blocks"], "lora": init_adapters(key)}}


def adapted(params, x):
    """A block of the base with its adapted weights; what a unit gathers is the base and the adapters of one layer."""
    changes = {name: lora["up"] @ lora["down"] for name, lora in params["lora"].items()}
    return BASE.block({**params["base"], **{n: params["base"][n] + w for n, w in changes.items()}}, x)


THIN = {"down": ("layers", None, "embed"), "up": ("layers", "embed", None)}
NAMES = {**BASE.names, "blocks": {"base": BASE.names["blocks"], "lora": dict.fromkeys(ADAPTED, THIN)}}
MODEL = BASE._replace(init=init, block=adapted, names=NAMES)
FROZEN = ("embed", "blocks.base", "head")


def batch_of(step, mesh, stride):
    """This rank's rows of a batch in which tokens count upwards by a stride, modulo 64."""
    starts = fs.random.uniform(fs.random.fold_in(fs.random.key(1), step), (BATCH, 1), high=64).tensor().long()
    rows = (starts + stride * torch.arange(LENGTH + 1)) % 64
    index, count = fs.data_rank_and_size(mesh)
    mine = rows.chunk(count)[index]
    return {"tokens": mine[:, :-1], "targets": mine[:, 1:]}


def run(model, opt, state, steps, mesh, stride):
    step, losses = fs.make_train_step(model, opt, donate=True), []
    for number in range(steps):
        state, metrics = step(state, batch_of(number, mesh, stride))
        losses.append(float(metrics.loss))
    return state, losses


def train():
    """What each rank runs: returns losses, and bytes of state here when all is trained and when adapters are."""
    mesh = fs.make_mesh(dp=-1)
    opt = fs.adamw(1e-2)

    # The base learns to count by ones.
    layout = fs.plan_layout(BASE, mesh, strategy=fs.zero(3))
    base = fs.init_state(BASE, opt, fs.random.key(0), layout)
    base, before = run(BASE, opt, base, PRETRAINING, mesh, stride=1)

    # The adapters learn to count by threes. Both trees are cut alike, so the base is handed over as it lies.
    layout = fs.plan_layout(MODEL, mesh, strategy=fs.zero(3), frozen=FROZEN)
    state = fs.init_state(MODEL, opt, fs.random.key(1), layout)
    kept = {**base.params, "blocks": {"base": base.params["blocks"], "lora": state.params["blocks"]["lora"]}}
    state = state.replace(params=kept)
    frozen = {path: x.to_local().clone() for path, x in fs.tree.named_leaves(kept).items() if "lora" not in path}
    state, after = run(MODEL, opt, state, STEPS, mesh, stride=3)
    unchanged = all(torch.equal(fs.tree.at(state.params, path).to_local(), x) for path, x in frozen.items())
    sizes = {
        "all": (fs.debug.state_bytes(base.params), fs.debug.state_bytes(base.opt_state)),
        "adapters": (fs.debug.state_bytes(state.params), fs.debug.state_bytes(state.opt_state)),
    }
    return before, after, sizes, unchanged


if __name__ == "__main__":
    before, after, sizes, unchanged = fs.run_ranks(train, RANKS)[0]
    print(f"base, counting by ones:       loss {before[0]:.3f} to {before[-1]:.3f}")
    print(f"adapters, counting by threes: loss {after[0]:.3f} to {after[-1]:.3f}")
    for what, (params, moments) in sizes.items():
        print(f"trained {what:8s}  {params:7d} bytes of parameters  {moments:7d} bytes of optimizer state a rank")
    assert unchanged and after[-1] < 0.8 * after[0]
    share = sizes["all"][1] / sizes["adapters"][1]
    print(f"the base has not changed in any bit, and the optimizer state is {share:.0f} times smaller")
