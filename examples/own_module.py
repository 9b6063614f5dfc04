"""A module of your own, in plain torch and with dropout, trained on two local ranks; nothing in it knows of ranks.

Run it with `python examples/own_module.py`. It learns to write rows of digits backwards.
"""

import torch
import torch.nn.functional as F
from torch import nn

import fsharding as fs

RANKS, STEPS, BATCH, LENGTH, WIDTH, DEPTH = 2, 40, 64, 6, 32, 3
KEY = fs.random.key(0)


class Mixer(nn.Module):
    """A block: mixes positions, then channels."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.along = nn.Linear(LENGTH, LENGTH)
        self.across = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        y = self.along(self.norm(x).mT).mT
        return x + self.drop(y + self.across(y))


class Backwards(nn.Module):
    """Any nn.Module would do: a loop over blocks, other inputs and outputs, tied weights, buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, digits):
        x = self.embed(digits)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


def rows(number):
    return fs.random.uniform(fs.random.fold_in(KEY, number), (BATCH, LENGTH), high=10).tensor().long()


def train(strategy):
    """What each rank runs."""
    mesh = fs.make_mesh(dp=-1)
    with torch.device("meta"):
        module = Backwards()  # no memory yet: each rank draws its own slices below
    net = fs.functionalize(module, ("embed", "blocks.*", ("norm", "head")))

    def loss_fn(params, batch):
        """The sum of this rank's losses, and how many there are. Each unit is gathered where the module calls it."""
        logits = net(params, batch["digits"], random_key=batch["keys"][0])["logits"]
        targets = batch["digits"].flip(1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()

    layout = fs.plan_layout(net, mesh, strategy=strategy)
    opt = fs.adamw(fs.optim.schedules.warmup_cosine(2e-2, 5, STEPS))
    state = fs.init_state(net, opt, KEY, layout)
    step = fs.make_train_step(loss_fn, opt, donate=True)
    index, count = fs.data_rank_and_size(mesh)
    losses = []
    for number in range(STEPS):
        keys = fs.random.fold_in(KEY, number)[None]  # one for each microbatch
        state, metrics = step(state, {"digits": rows(number).chunk(count)[index], "keys": keys})
        losses.append(float(metrics.loss))
    return str(net.anatomy), losses, fs.debug.state_bytes(state), net.state_dict(fs.unshard(state.params))


if __name__ == "__main__":
    results = {}
    for name, strategy in {"zero0": fs.zero(0), "zero3": fs.zero(3)}.items():
        anatomy, losses, size, weights = fs.run_ranks(train, RANKS, strategy)[0]
        results[name] = losses
        if name == "zero0":
            print(anatomy)
        shown = " ".join(f"{loss:.4f}" for loss in losses[::8] + losses[-1:])
        print(f"{name}: {size:6d} bytes of state a rank, losses {shown}")
    module = Backwards().eval()
    module.load_state_dict(weights)
    right = module(rows(STEPS))["logits"].argmax(-1) == rows(STEPS).flip(1)
    print(f"right digits of the module by itself: {float(right.float().mean()):.2f}")
    assert right.float().mean() > 0.95
    assert results["zero0"] == results["zero3"]
    print("the losses are equal in every bit")
