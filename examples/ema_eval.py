"""Evaluates a moving average of the parameters beside the parameters themselves, on two local ranks, under zero(3).

Run it with `python examples/ema_eval.py`. The average is a part of the optimizer state, cut as the main parameters.
"""

import torch
import torch.nn.functional as F

import fsharding as fs

RANKS, STEPS, BATCH, WIDTH, NOISE = 2, 120, 64, 33, 0.5
RULES = fs.AxisRules(hidden=("dp",))
NAMES = {"w1": ("hidden", None), "b1": ("hidden",), "w2": (None, "hidden"), "b2": (None,)}


def init(key):
    first, second = fs.random.split(key)
    return {
        "w1": fs.random.normal(first, (WIDTH, 2)),
        "b1": fs.random.zeros((WIDTH,)),
        "w2": fs.random.normal(second, (1, WIDTH), std=WIDTH**-0.5),
        "b2": fs.random.zeros((1,)),
    }


def loss_fn(params, batch):
    """The sum of this rank's squared errors, and how many there are."""
    unit = fs.gather_unit(params)
    hidden = torch.tanh(F.linear(batch["x"], unit["w1"], unit["b1"]))
    error = F.linear(hidden, unit["w2"], unit["b2"])[:, 0] - batch["y"]
    return error.square().sum(), error.numel()


def batch_of(number, mesh, noise):
    """This rank's points of a global batch; the targets have noise that nobody can learn."""
    points, noises = fs.random.split(fs.random.fold_in(fs.random.key(1), number))
    x = fs.random.uniform(points, (BATCH, 2), low=-2, high=2).tensor()
    y = x[:, 0].sin() * x[:, 1].cos() + fs.random.normal(noises, (BATCH,), std=noise).tensor()
    return fs.local_batch({"x": x, "y": y}, mesh)


def train():
    """What each rank runs: returns the errors without noise of the parameters and of their average, step by step."""
    mesh = fs.make_mesh(dp=-1)
    layout = fs.plan_layout(init(fs.random.key(0)), mesh, RULES, fs.zero(3), names=NAMES)
    # Young averages forget faster, so that the first parameters do not stay in them.
    average = fs.optim.ema(lambda count: min(0.98, (1 + count) / (10 + count)))
    opt = fs.optim.chain(fs.adamw(2e-2), average)
    state = fs.init_state(init, opt, fs.random.key(0), layout)
    step, evaluate = fs.make_train_step(loss_fn, opt, donate=True), fs.value_and_grad(loss_fn)

    def error(params):
        return float(evaluate(params, batch_of(1000, mesh, 0.0))[0][0])

    errors = []
    for number in range(STEPS):
        state, _ = step(state, batch_of(number, mesh, NOISE))
        if (number + 1) % 20 == 0:
            # Main parameters become parameters as after a step: cast, and gathered where they are less cut.
            averaged = fs.params_from_main(fs.optim.ema_of(state.opt_state), state.params, layout)
            errors.append((number + 1, error(state.params), error(averaged)))
    leaf = fs.optim.ema_of(state.opt_state)["w1"]
    return errors, f"the average of w1 is {fs.typeof(leaf)}, here {list(leaf.to_local().shape)}"


if __name__ == "__main__":
    errors, where = fs.run_ranks(train, RANKS)[0]
    for number, plain, averaged in errors:
        print(f"step {number:3d}  error of the parameters {plain:.4f}  of their average {averaged:.4f}")
    print(where)
    late = errors[len(errors) // 2 :]
    plain, averaged = (sum(row[i] for row in late) / len(late) for i in (1, 2))
    assert averaged < plain
    print(f"the average has {plain / averaged:.1f} times less error over the second half")
