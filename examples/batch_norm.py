"""A small convolutional net with batch norms, trained on two local ranks with the statistics of the full batch.

Run it with `python examples/batch_norm.py`. It learns which half of a noisy picture is brighter.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import fsharding as fs

RANKS, STEPS, BATCH = 2, 30, 32
KEY = fs.random.key(0)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(),
        nn.Linear(16, 2),
    )  # fmt: skip


def pictures(number):
    """One batch: pictures of 8 times 8, and which half is brighter."""
    image, side = fs.random.split(fs.random.fold_in(KEY, number))
    labels = fs.random.bernoulli(side, (BATCH,), 0.5).tensor().long()
    shift = F.one_hot(labels, 2).float().repeat_interleave(4, 1)[:, None, None]
    return {"x": fs.random.normal(image, (BATCH, 1, 8, 8)).tensor() + shift + 3, "y": labels}


def train(strategy):
    """What each rank runs."""
    module = nn.SyncBatchNorm.convert_sync_batchnorm(make_net())  # statistics of all data ranks
    net = fs.functionalize(module, ["0", "4", "9"])

    def loss_fn(params, batch, buffers):
        """Running statistics go in and come out. A step hands them on; evaluation normalizes with them."""
        logits, buffers = net(params, batch["x"], buffers=buffers)
        return fs.Loss(F.cross_entropy(logits, batch["y"], reduction="sum"), len(logits)), buffers

    mesh = fs.make_mesh(dp=-1)
    state, step = fs.setup(net, loss_fn, fs.sgd(0.1), KEY, strategy, mesh=mesh)
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, fs.local_batch(pictures(number), mesh))
        losses.append(float(metrics.loss))
    fs.debug.check_replicas(state)
    held_out = fs.evaluate(loss_fn)(state, fs.local_batch(pictures(STEPS), mesh))
    return losses, float(held_out.mean), net.state_dict(fs.unshard(state.params), state.buffers)


def train_in_torch(module):
    """The same on one process, in plain torch."""
    opt, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for number in range(STEPS):
        batch = pictures(number)
        loss = F.cross_entropy(module(batch["x"]), batch["y"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    plain = make_net()
    want = train_in_torch(plain)
    results = {strategy: fs.run_ranks(train, RANKS, strategy)[0] for strategy in ("zero0", "zero3")}
    for strategy, (losses, held_out, _) in results.items():
        shown = " ".join(f"{loss:.4f}" for loss in losses[::6] + losses[-1:])
        print(f"{strategy}: losses {shown}, held out {held_out:.4f}")
    assert results["zero0"][:2] == results["zero3"][:2]
    torch.testing.assert_close(results["zero3"][0], want, rtol=1e-3, atol=1e-4)
    saved = copy.deepcopy(plain)
    saved.load_state_dict(results["zero3"][2])
    torch.testing.assert_close(saved[1].running_var, plain[1].running_var, rtol=1e-3, atol=1e-4)
    print(f"batches that the statistics have seen: {int(saved[1].num_batches_tracked)}")
    print("the losses are those of one process in plain torch, and equal in every bit under both strategies")
