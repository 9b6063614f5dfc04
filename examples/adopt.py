"""An optimizer that the library lacks, from its paper: ADOPT (Taniguchi et al., 2024, algorithm 2), as a rule.

Run it with `python examples/adopt.py`. A rule is a few lines on lists of tensors; shardings, 8-bit moments, donation,
schedules and checkpoints come with `fs.optim.elementwise`. Two ranks under zero(3) train as a plain loop of torch does.
"""

import torch

import fsharding as fs

RANKS, STEPS, RATE, B1, B2, EPS = 2, 30, 0.05, 0.9, 0.9999, 1e-6


def adopt(rate):
    def rule(grads, mu, nu, count):
        directions = []
        for g, m, v in zip(grads, mu, nu, strict=True):
            scaled = (g / v.sqrt().clamp(min=EPS)).clamp(-1, 1)
            # The first gradient only sets the second moment.
            m.copy_(torch.where(count > 0, m.lerp(scaled, 1 - B1), m))
            v.copy_(torch.where(count > 0, v.lerp(g * g, 1 - B2), g * g))
            directions.append(m.clone())
        return directions

    return fs.optim.elementwise(rule, rate, ("mu", "nu"), roots=("nu",))


def init(key):
    first, second = fs.random.split(key)
    return {"w1": fs.random.normal(first, (8, 16), std=0.5), "w2": fs.random.normal(second, (16, 1), std=0.5)}


def errors_of(w1, w2, batch):
    return ((batch["x"] @ w1).tanh() @ w2 - batch["y"]).square()


def loss_fn(params, batch):
    weights = fs.gather_unit(params)
    errors = errors_of(weights["w1"], weights["w2"], batch)
    return errors.sum(), errors.numel()


def data():
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": x[:, :2].prod(1, keepdim=True)}


def train():
    """What each rank runs: the first weights, the losses, and where the second moment of a weight is."""
    state, step = fs.setup(init, loss_fn, adopt(RATE), fs.random.key(0), "zero3")
    first = [fs.unshard(leaf).clone() for leaf in fs.tree.leaves(state.params)]
    batch, losses = fs.local_batch(data(), state.layout.mesh), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return first, losses, str(fs.typeof(state.opt_state.moments["nu"]["w1"]))


def plain_loop(first):
    """The same in plain torch, in one process, as the paper writes it."""
    weights = [w.requires_grad_() for w in first]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    batch, losses = data(), []
    for t in range(STEPS):
        loss = errors_of(*weights, batch).mean()
        losses.append(float(loss.detach()))
        grads = torch.autograd.grad(loss, weights)
        for w, g, (m, v) in zip(weights, grads, moments, strict=True):
            if t > 0:
                m.mul_(B1).add_((1 - B1) * (g / v.sqrt().clamp(min=EPS)).clamp(-1, 1))
                with torch.no_grad():
                    w.sub_(RATE * m)
                v.mul_(B2).add_((1 - B2) * g * g)
            else:
                v.copy_(g * g)
    return losses


def main():
    (first, ours, home), *_ = fs.run_ranks(train, RANKS)
    plain = plain_loop(first)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=1e-4, atol=0)
    print(f"zero3 on {RANKS} ranks: losses {ours[0]:.4f} to {ours[-1]:.4f}, nu is {home}")
    print("the losses of a plain loop, to rounding")


if __name__ == "__main__":
    main()
