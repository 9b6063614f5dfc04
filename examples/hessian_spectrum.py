"""The largest eigenvalues of the Hessian of a trained model, by Lanczos, with everything cut over two local ranks.

Run it with `python examples/hessian_spectrum.py [--plot spectrum.png]`. A Hessian-vector product is two transforms of
torch.func around the loss; parameters, vectors and products stay cut as zero(3) cuts them, and no rank has a whole one.
"""

import argparse

import torch
import torch.nn.functional as F

import fsharding as fs

RANKS, WIDTH, DEPTH, POINTS, STEPS, KRYLOV, TOP = 2, 16, 2, 128, 100, 15, 5


def init(key):
    first, hidden, last = fs.random.split(key, 3)
    return {
        "first": {"w": fs.random.normal(first, (WIDTH, 2)), "b": fs.random.zeros((WIDTH,))},
        "hidden": {"w": fs.random.normal(hidden, (DEPTH, WIDTH, WIDTH), std=WIDTH**-0.5)},
        "last": {"w": fs.random.normal(last, (1, WIDTH), std=WIDTH**-0.5)},
    }


NAMES = {
    "first": {"w": ("mlp", None), "b": ("mlp",)},
    "hidden": {"w": ("layers", "mlp", None)},
    "last": {"w": (None, "mlp")},
}
RULES = fs.AxisRules(layers=None, mlp=("dp",))


def loss_fn(params, batch):
    """The sum of this rank's squared errors, and how many there are."""
    first = fs.gather_unit(params["first"])
    x = torch.tanh(F.linear(batch["x"], first["w"], first["b"]))
    x = fs.scan_units(lambda p, x: torch.tanh(F.linear(x, p["w"])), params["hidden"], x)
    error = F.linear(x, fs.gather_unit(params["last"])["w"])[:, 0] - batch["y"]
    return error.square().sum(), error.numel()


def scaled(tree, factor):
    return fs.tree.map(lambda x: x * factor, tree)


def lanczos(product, start, steps):
    """The tridiagonal matrix of a symmetric map on sharded trees (Lanczos 1950), orthogonalized against all vectors."""
    basis, diagonal, beside = [scaled(start, 1 / fs.tree.vdot(start, start).sqrt())], [], []
    for _ in range(steps):
        w = product(basis[-1])
        diagonal.append(fs.tree.vdot(w, basis[-1]))
        for _ in range(2):
            for v in basis:
                along = fs.tree.vdot(w, v)
                w = fs.tree.map(lambda a, b, along=along: a - along * b, w, v)
        beside.append(fs.tree.vdot(w, w).sqrt())
        basis.append(scaled(w, 1 / beside[-1]))
    off = torch.stack(beside[:-1])
    return torch.diag(torch.stack(diagonal)) + torch.diag(off, 1) + torch.diag(off, -1)


def spectrum(strategy):
    """What each rank runs: trains, then returns the eigenvalues that Lanczos finds, and how a leaf lives."""
    mesh = fs.make_mesh(dp=-1)
    layout = fs.plan_layout(init(fs.random.key(0)), mesh, RULES, strategy, names=NAMES)
    opt = fs.adamw(1e-2)
    state = fs.init_state(init, opt, fs.random.key(0), layout)
    index, count = fs.data_rank_and_size(mesh)
    points = fs.random.uniform(fs.random.key(1), (POINTS, 2), low=-2, high=2).tensor()
    batch = {"x": points.chunk(count)[index], "y": (points[:, 0].sin() * points[:, 1].cos()).chunk(count)[index]}
    step = fs.make_train_step(loss_fn, opt, donate=True)
    for _ in range(STEPS):
        state, metrics = step(state, batch)

    def run(params, start):
        """In flight: the sum of the ranks' errors is what torch.func differentiates, twice."""
        gradient = torch.func.grad(lambda p: loss_fn(p, batch)[0] / POINTS)
        along = torch.func.grad(lambda p, v: fs.tree.vdot(gradient(p), v))
        return lanczos(lambda v: along(params, v), start, KRYLOV)

    leaves = init(fs.random.key(2))
    start = fs.shard(fs.tree.map(lambda d: fs.random.normal(fs.random.key(3), d.shape).tensor(), leaves), layout)
    matrix = fs.shard_map(run)(state.params, start)
    leaf = state.params["hidden"]["w"]
    return torch.linalg.eigvalsh(matrix.double()).flip(0), float(metrics.loss), f"{fs.typeof(leaf)}"


def plot(values, path):
    import matplotlib  # lazy: only where a plot is asked for

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # lazy: the same

    fig, axes = plt.subplots(figsize=(6, 3))
    axes.stem(range(1, len(values) + 1), values.tolist())
    axes.set(xlabel="eigenvalue, largest first", ylabel="curvature", title="Hessian of the loss, by Lanczos")
    fig.savefig(path, bbox_inches="tight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", help="where a figure of the eigenvalues goes")
    args = parser.parse_args()
    cut, loss, leaf = fs.run_ranks(spectrum, RANKS, fs.zero(3))[0]
    alone = fs.run_ranks(spectrum, 1, fs.zero(0))[0][0]
    print(f"loss {loss:.5f}; hidden weights are {leaf}")
    print(f"zero(3) on {RANKS} ranks:", " ".join(f"{v:.5f}" for v in cut[:TOP]))
    print("one process:        ", " ".join(f"{v:.5f}" for v in alone[:TOP]))
    torch.testing.assert_close(cut[:TOP], alone[:TOP], rtol=1e-2, atol=1e-3)
    if args.plot:
        plot(cut, args.plot)
        print(f"wrote {args.plot}")
    print("the largest eigenvalues agree")
