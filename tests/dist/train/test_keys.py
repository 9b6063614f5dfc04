"""Keys of a run: the loss function that asks for one gets the same after a resume, in every layout; auxes come back."""

import pytest
import torch

import fsharding as fs
from fsharding.base.errors import ConfigError
from fsharding.mesh.consistency import checksum
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.testing import assert_bitwise_equal, run_ranks

ROWS, WIDTH = 8, 6


def init(key):
    first, last = fs.random.split(key, 2)
    return {"first": fs.random.normal(first, (WIDTH, WIDTH)), "last": fs.random.normal(last, (3, WIDTH))}


def batches(mesh, steps):
    index, count = data_rank_and_size(mesh)
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator).chunk(count)[index] for _ in range(steps)]


def with_dropout(params, batch, *, key):
    """Drops hidden units by rows of the global batch, so that each layout drops the same ones."""
    index, count = data_rank_and_size(params["first"].sharding.mesh)
    kept = fs.random.bernoulli(key, (len(batch) * count, WIDTH), 0.5).tensor().chunk(count)[index]
    hidden = torch.tanh(batch @ fs.gather_unit(params["first"]).T) * kept
    out = hidden @ fs.gather_unit(params["last"]).T
    return (out.square().sum(), len(batch)), {"key": key, "kept": kept.float().mean(), "out": out}


def start(axes, strategy, microbatches=1, seed=0):
    mesh, opt = fs.make_mesh(**axes), fs.adamw(1e-2)
    layout = fs.plan_layout(init(fs.random.key(0)), mesh, strategy=strategy)
    step = fs.make_train_step(with_dropout, opt, has_aux=True, microbatches=microbatches)
    return mesh, opt, fs.init_state(init, opt, fs.random.key(seed), layout), step


def train(axes, strategy, folder=None, steps=4, microbatches=1, seed=0):
    mesh, opt, state, step = start(axes, strategy, microbatches, seed)
    losses, keys = [], []
    for i, batch in enumerate(batches(mesh, steps)):
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
        keys += [aux["key"].tolist() for aux in metrics.aux]
        assert all(
            not aux["out"].requires_grad and len(aux["out"]) == len(batch) // microbatches for aux in metrics.aux
        )
        if folder is not None and i == 1:
            fs.checkpoint.save(f"{folder}/ckpt", state)
            state = fs.checkpoint.load(f"{folder}/ckpt", state.layout, opt=opt)
    return torch.stack(losses), keys


def test_a_loss_that_asks_gets_a_key_of_its_step(tmp_path):
    one, keys = run_ranks(train, 1, {"dp": 1}, fs.zero(0))[0]
    assert len({tuple(key) for key in keys}) == 4
    run_key = fs.random.split(fs.random.key(0))[1]
    assert keys == [fs.random.fold_in(fs.random.fold_in(run_key, i), 0).tolist() for i in range(4)]
    for level in (0, 1, 3):
        for losses, there in run_ranks(train, 2, {"dp": 2}, fs.zero(level), str(tmp_path / f"{level}")):
            assert there == keys
            torch.testing.assert_close(losses, one, rtol=1e-5, atol=0)
    other, _ = run_ranks(train, 1, {"dp": 1}, fs.zero(0), None, 4, 1, 1)[0]
    assert not torch.equal(other, one)


def test_each_microbatch_has_a_key_of_its_own():
    for _, keys in run_ranks(train, 2, {"dp": 2}, fs.zero(2), steps=2, microbatches=2):
        assert len({tuple(key) for key in keys}) == 4


def test_a_loss_that_does_not_ask_gets_none():
    layout = fs.plan_layout(init(fs.random.key(0)), fs.make_mesh(dp=1, device="cpu"))
    state = fs.init_state(init, fs.sgd(0.1), fs.random.key(0), layout)
    bound = fs.make_train_step(
        lambda params, batch, key="mine": (fs.gather_unit(params["first"]).sum(), len(key)), fs.sgd(0.1)
    )
    assert bound(state, torch.ones(2, 2))[1].count == 4 and bound(state, torch.ones(2, 2))[1].aux == ()
    model = fs.models.decoder(
        fs.models.DecoderConfig(vocab_size=8, dim=8, layers=1, heads=2, kv_heads=2, intermediate_size=8)
    )
    with pytest.raises(ConfigError) as error:
        fs.make_train_step(model, fs.sgd(0.1), has_aux=True)
    assert str(error.value) == (
        "fs.make_train_step got has_aux with a Model, which returns no aux.\n"
        "Give a loss function that calls the model's parts: fs.model_loss(model) returns (sum, count)."
    )


# ---------------------------------------------------------------------------------------------------------- the first values
def drawn_by_torch(key):
    return {"w": torch.randn(6, 4), "b": torch.zeros(4), "drawn": fs.random.normal(key, (3,))}


def begin(strategy, seeds, keys):
    rank = torch.distributed.get_rank()
    torch.manual_seed(seeds[rank])
    layout = fs.plan_layout(drawn_by_torch(fs.random.key(0)), fs.make_mesh(dp=2), strategy=strategy)
    torch.manual_seed(seeds[rank])
    try:
        state = fs.init_state(drawn_by_torch, fs.sgd(0.1), fs.random.key(keys[rank]), layout)
    except ConfigError as error:
        return str(error)
    return fs.unshard(state.params)["w"]


@pytest.mark.parametrize("strategy", [fs.zero(0), fs.zero(3)], ids=str)
def test_ranks_that_begin_with_other_values_are_refused(strategy):
    one, two = run_ranks(begin, 2, strategy, (5, 5), (0, 0))
    assert_bitwise_equal(one, two)
    texts = run_ranks(begin, 2, strategy, (5, 6), (0, 0))
    torch.manual_seed(5)
    first = checksum(torch.randn(6, 4))
    torch.manual_seed(6)
    second = checksum(torch.randn(6, 4))
    assert texts[0] == texts[1] == (
        "fs.init_state got different first values on different ranks.\n"
        f"  params.w: rank 1 has float32[6, 4] of checksum {second:016x}, rank 0 has float32[6, 4] of checksum {first:016x}\n"
        "Draw from the key alone: fs.random.normal(key, shape) is the same on every rank, whatever the seed of torch; or"
        ' give every rank the same key and tensors. Or pass sync="rank0", which sends the values of rank 0 to all.'
    )  # fmt: skip
    text, _ = run_ranks(begin, 2, strategy, (5, 5), (0, 1))
    assert "\n  key: rank 1 has " in text and "\n  params.drawn: rank 1 has LazyTensor(shape=(3,)," in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float64, torch.int64], ids=str)
def test_a_checksum_sees_every_byte(dtype):
    x = torch.randn(37, 5, generator=torch.Generator().manual_seed(0))
    x = x > 0 if dtype == torch.bool else (1000 * x).to(dtype)
    flips = [x.clone() for _ in range(40)]
    for i, flipped in enumerate(flips):
        flipped.view(torch.uint8).view(-1)[i * 4 + 1] ^= 1
    other = [x.t().contiguous(), x[:36], torch.cat([x, x[:1] * 0])]
    sums = [checksum(y) for y in [x, *flips, *other]]
    assert checksum(x.clone()) == sums[0] and len({*sums}) == len(sums)
    assert checksum(x.t()) == checksum(x.t().contiguous()) and checksum(torch.zeros(0)) != checksum(torch.zeros(1))
