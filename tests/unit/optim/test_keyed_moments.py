"""Moments below float32 are rounded up or down by key: their mean follows the exact recurrence, in every optimizer."""

import pytest
import torch

import fsharding as fs
from fsharding import optim
from fsharding.base.errors import ConfigError
from fsharding.formats.philox import coarse_uniform_at
from fsharding.testing import assert_bitwise_equal
from tests.helpers import decoded, normal_tree, refusal

BF16, F16 = torch.bfloat16, torch.float16
SHAPE = (64, 64)
STEPS = 200


def followed(grads, mu, count):
    return [m.lerp_(g, 0.001) for m, g in zip(mu, grads, strict=True)]


MOMENTS = {
    "adamw": (lambda **how: fs.adamw(0.0, b2=0.999, **how), "nu", lambda v, g, t: 0.999 * v + 0.001 * g * g),
    "sgd": (lambda **how: fs.sgd(0.0, momentum=0.999, **how), "trace", lambda m, g, t: 0.999 * m + g),
    "lion": (lambda **how: optim.lion(0.0, b2=0.999, **how), "mu", lambda m, g, t: 0.999 * m + 0.001 * g),
    "muon": (lambda **how: optim.muon(0.0, momentum=0.999, **how), "mu", lambda m, g, t: 0.999 * m + 0.001 * g),
    "elementwise": (
        lambda **how: optim.elementwise(followed, 0.0, **how),
        "moments.mu",
        lambda m, g, t: 0.999 * m + 0.001 * g,
    ),
    "adafactor": (
        lambda **how: optim.adafactor(0.0, beta2_decay=-1.2, **how),
        "row",
        lambda v, g, t: v + t**-1.2 * (g * g - v),
    ),
}  # fmt: skip
"""An optimizer, the path of its slowest moment, and the recurrence of that for an element."""


MX = fs.formats.MXFP8
NEAR = {BF16: 0.01, F16: 0.01, MX: 0.05}
"""How far the mean of 4096 elements may be from the recurrence: about four deviations of a sum of roundings."""


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, BF16) for name in MOMENTS), ("adamw", F16), ("adafactor", F16), ("lion", MX), ("adamw", MX)],
    ids=str,
)
def test_a_moment_follows_its_recurrence_up_and_down(name, how):
    make, path, recurrence = MOMENTS[name]
    shape = (4096, 2) if name == "adafactor" else (64, 64)
    opt, params, roundings = make(moments=how), {"w": torch.zeros(shape)}, (None, "nearest")
    states, want, off = dict.fromkeys(roundings, opt.init(params)), 0.0, dict[str | None, float]()
    for t in range(1, 2 * STEPS + 1):
        g = 0.5 if t <= STEPS else 0.1
        want = recurrence(want, g, t)
        for rounding in roundings:
            context = optim.UpdateContext(rounding=rounding)
            _, states[rounding] = opt.update({"w": torch.full(shape, g)}, states[rounding], params, context)
        if t % STEPS:
            continue
        for rounding, state in states.items():
            moment = fs.tree.at(state, path)
            off[rounding] = float(decoded(moment["w"]).mean()) / want - 1
        assert abs(off[None]) < NEAR[how], (t, off)
    # The root of a second moment in 8 bits is always rounded by key.
    assert how == F16 or (name, how) == ("adamw", MX) or abs(off["nearest"]) > 3 * NEAR[how], (
        "rounded to nearest it stops"
    )


def splitmix(seed, count):
    """SplitMix64 as its authors print it, on Python's numbers."""
    most, result = (1 << 64) - 1, list[int]()
    for _ in range(count):
        seed = z = (seed + 0x9E3779B97F4A7C15) & most
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & most
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & most
        result.append(z ^ (z >> 31))
    return result


def mixed(z):
    (result,) = splitmix((z - 0x9E3779B97F4A7C15) % (1 << 64), 1)
    return result


def test_bits_are_those_of_splitmix_and_belong_to_a_place():
    key, stream, shape, cpu = fs.random.key(3), 0xDEADBEEF, (3, 5, 10), torch.device("cpu")
    found = coarse_uniform_at(key, stream, shape, [(0, n) for n in shape], cpu)
    first, second = key.tolist()
    seed = mixed(mixed(first | second << 32) ^ stream)
    words = splitmix((seed - 0x9E3779B97F4A7C15) % (1 << 64), 15 * 3)  # 10 numbers of 16 bits need 3 words
    want = [(words[row * 3 + i // 4] >> 16 * (i % 4) & 0xFFFF) / 65536 for row in range(15) for i in range(10)]
    assert found.flatten().tolist() == want
    part = coarse_uniform_at(key, stream, shape, [(1, 3), (2, 5), (3, 9)], cpu)
    assert_bitwise_equal(part, found[1:3, 2:5, 3:9].contiguous())


@pytest.mark.parametrize("donate", [False, True])
def test_an_update_that_does_not_count_leaves_moments_as_they_are(donate):
    params = normal_tree({"w": (9, 30), "s": ()}, 0)
    opt = fs.adamw(0.1, moments=BF16)
    _, state = optim.apply_gradients(opt, normal_tree({"w": (9, 30), "s": ()}, 1), opt.init(params), params)
    kept = fs.tree.map(torch.clone, (params, state))
    context = optim.UpdateContext(donate=donate, finite=torch.tensor(False))
    found = optim.apply_gradients(opt, normal_tree({"w": (9, 30), "s": ()}, 2), state, params, context)
    assert_bitwise_equal(found, kept)


def test_bits_depend_on_key_update_leaf_and_moment():
    params = {name: torch.zeros(64, 64) for name in "ab"}
    opt = fs.optim.elementwise(
        lambda grads, m, n, count: (followed(grads, m, count), followed(grads, n, count))[0], 0.0, "mn", moments=BF16
    )
    grads = {name: torch.full((64, 64), 0.7) for name in "ab"}

    def after(**how):
        moments = opt.update(grads, opt.init(params), params, optim.UpdateContext(**how))[1].moments
        return [moments[m][name] for m in "mn" for name in "ab"]

    runs = [*after(), *after(key=fs.random.key(1)), *after(step=torch.tensor(5))]
    assert len({tuple(x.flatten().tolist()) for x in runs}) == 12
    assert_bitwise_equal(after(), after())


def test_torchs_optimizers_take_no_narrow_moments():
    mend = "Give it moments=torch.float32 of its own, or use an optimizer such as fs.adamw, which rounds by key."
    text = "fs.optim.from_torch{} cannot keep moments in {}: torch's kernels round to nearest, which loses most of their changes."
    assert refusal(optim.from_torch, torch.optim.Adam, moments=BF16, kind=ConfigError) == (
        f"{text.format('', BF16)}\n{mend}"
    )
    init = optim.from_torch(torch.optim.Adam).init
    found = refusal(init, {"w": torch.ones(2)}, optim.InitContext(moments=F16), kind=ConfigError)
    assert found == f"{text.format('', F16)}\n{mend}"
    own = optim.from_torch(torch.optim.Adam, moments=torch.float32).init(
        {"w": torch.ones(2)}, optim.InitContext(moments=F16)
    )
    assert own.slots["exp_avg"]["w"].dtype == torch.float32
