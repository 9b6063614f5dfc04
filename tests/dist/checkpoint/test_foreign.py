"""Weights of FSDP2 and DDP on real ranks: in and out bit by bit, moments too, and offline reshards that are what ranks save."""

import os

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.base.errors import CheckpointError, RankError
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from fsharding.train.state import main_of
from tests.helpers import full

LAYERS, WIDTH, VOCAB = 3, 6, 13
NAMES = {
    "table": "table.weight",
    "blocks.w": "layers.{i}.up.weight",
    "blocks.b": "layers.{i}.up.bias",
    "blocks.down": fs.foreign.Transposed("layers.{i}.down.weight"),
}
LAYOUTS = {
    "zero3": ({"dp": -1}, fs.zero(3), fs.FP32),
    "zero0": ({"dp": -1}, fs.zero(0), fs.FP32),
    "zero1_bf16": ({"dp": -1}, fs.zero(1), fs.BF16),
    "tp": ({"tp": 2, "dp": -1}, fs.zero(2), fs.FP32),
    "pp_hsdp": ({"pp": 2, "replica": -1}, fs.hybrid(), fs.FP32),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def ours(key=None):
    """The same parameters here: blocks stacked, `down` the other way round."""
    return {
        "table": fs.random.zeros((VOCAB, WIDTH)),
        "blocks": {
            "w": fs.random.zeros((LAYERS, 9, WIDTH)),
            "b": fs.random.zeros((LAYERS, 9)),
            "down": fs.random.zeros((LAYERS, 9, WIDTH)),
        },
    }


DIM_NAMES = {
    "table": ("vocab", "embed"),
    "blocks": {"w": ("layers", "mlp", "embed"), "b": ("layers", "mlp"), "down": ("layers", "mlp", "embed")},
}


def planned(name):
    axes, strategy, precision = LAYOUTS[name]
    mesh = fs.make_mesh(**axes)
    return fs.plan_layout(ours(), mesh, strategy=strategy, precision=precision, names=DIM_NAMES)


def trained(wrap, steps=3):
    """A model after some steps of AdamW, each rank on its own tokens."""
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        tokens = torch.arange(8).reshape(2, 4) * (step + 1 + dist.get_rank()) % VOCAB
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fsdp2(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def stacked(named):
    """Foreign tensors as our leaves."""
    layers = [f"layers.{i}" for i in range(LAYERS)]
    return {
        "table": named["table.weight"],
        "blocks": {
            "w": torch.stack([named[f"{layer}.up.weight"] for layer in layers]),
            "b": torch.stack([named[f"{layer}.up.bias"] for layer in layers]),
            "down": torch.stack([named[f"{layer}.down.weight"].T for layer in layers]),
        },
    }


def save_fsdp2(folder):
    """Saves model and optimizer with DCP; returns the whole parameters and both moments."""
    model, optimizer = trained(fsdp2)
    state, moments = get_state_dict(model, optimizer)
    torch_dcp.save({"model": state, "optim": moments, "epoch": 3}, checkpoint_id=folder)
    params = {name: whole(x) for name, x in state.items()}
    mu, nu = ({name: whole(moments["state"][name][kind]) for name in params} for kind in ("exp_avg", "exp_avg_sq"))
    return params, mu, nu


def of_moments(path):
    """The names of Adam's state."""
    if path == "count":
        return "optim.state.table.weight.step"
    kind, _, rest = path.partition(".")
    name = NAMES[rest]
    text = name.name if isinstance(name, fs.foreign.Transposed) else name
    full = f"optim.state.{text}.{'exp_avg' if kind == 'mu' else 'exp_avg_sq'}"
    return fs.foreign.Transposed(full) if isinstance(name, fs.foreign.Transposed) else full


def gathered(values):
    return fs.tree.map(whole, values)


def read_fsdp2(folder, layout_name):
    layout = planned(layout_name)
    params = fs.foreign.load_weights(folder, layout, NAMES, prefix="model.")
    state = fs.state_from_params(params, fs.adamw(1e-2), fs.random.key(0), layout)
    moments = fs.foreign.load_weights(folder, state.opt_state, of_moments, cast=True, extra="ignore")
    state = state.replace(opt_state=moments, step=moments.count.clone())
    ck.save(f"{folder}.ours", state)
    main = main_of(state)
    return gathered(main), gathered(moments.mu), gathered(moments.nu), int(moments.count)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, "zero3"),
        pytest.param(2, "zero1_bf16", marks=full),
        (4, "tp"),
        pytest.param(4, "pp_hsdp", marks=full),
        pytest.param(1, "zero0", marks=full),
    ],
)
def test_a_run_of_fsdp2_goes_on_here_and_back(ranks, layout, tmp_path):
    params, mu, nu = run_ranks(save_fsdp2, 2, tmp_path / "theirs")[0]
    for main, first, second, count in run_ranks(read_fsdp2, ranks, tmp_path / "theirs", layout):
        assert_bitwise_equal(main, stacked(params))
        assert_bitwise_equal(first, stacked(mu))
        assert_bitwise_equal(second, stacked(nu))
        assert count == 3
    table = {f"params.{path}": at(name, "model.{}") for path, name in NAMES.items()}
    for kind, there in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
        table |= {f"opt_state.{kind}.{p}": at(name, f"optim.state.{{}}.{there}") for p, name in NAMES.items()}
    done = fs.foreign.export(f"{tmp_path}/theirs.ours", tmp_path / "back", "dcp", table, what="all", max_file_bytes=500)
    assert len(done.files) > 3
    for found in run_ranks(load_fsdp2, 2, tmp_path / "back"):
        assert_bitwise_equal(found, (params, mu, nu))


def at(name, pattern):
    return (
        fs.foreign.Transposed(pattern.format(name.name))
        if isinstance(name, fs.foreign.Transposed)
        else pattern.format(name)
    )


def load_fsdp2(folder):
    """Reads parameters and moments into a fresh FSDP2 model and its optimizer, as FSDP2's users do."""
    model, optimizer = trained(fsdp2, steps=1)
    state, moments = get_state_dict(model, optimizer)
    for values in moments["state"].values():
        values.pop("step")
    wanted = {"model": state, "optim": {"state": moments["state"]}}
    torch_dcp.load(wanted, checkpoint_id=folder)
    for values in moments["state"].values():
        values["step"] = torch.tensor(3.0)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    model(torch.arange(8).reshape(2, 4)).backward()
    params = {name: whole(x) for name, x in model.named_parameters()}
    mu, nu = (
        {name: whole(optimizer.state[x][kind]) for name, x in model.named_parameters()}
        for kind in ("exp_avg", "exp_avg_sq")
    )
    return params, mu, nu


class Whole(Net):
    """A tied head that is defined first, a persistent buffer, and blocks of which one is a unit of its own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) * self.scale.prod()).square().mean()


ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.1}
UNITS = (("table", "head"), "layers.0", "layers.*")


def adamw():
    return fs.adamw(1e-2, b2=0.999, eps=1e-4, weight_decay=0.1)


def grouped():
    return fs.optim.multi_transform(
        {"up": adamw(), "rest": adamw()}, lambda path, leaf: "up" if ".up." in path else "rest"
    )


OPTIMIZERS = {
    "adamw": adamw,
    "groups": lambda: fs.optim.chain(fs.optim.clip_by_global_norm(1e9), grouped()),
    "torch": lambda: fs.optim.from_torch(torch.optim.AdamW, **ADAM),
}


def whole_batch(step):
    return torch.arange(8).reshape(2, 4) * (step + 1) % VOCAB


def go_on_here(folder, kind):
    """Three steps, which are saved, and three more."""
    torch.manual_seed(0)
    module = Whole()
    net = fs.functionalize(module, UNITS)
    layout, opt = fs.plan_layout(net, fs.make_mesh(dp=2)), OPTIMIZERS[kind]()
    state = fs.init_state(net, opt, fs.random.key(0), layout)
    step = fs.make_train_step(lambda params, tokens: (net(params, tokens), 1), opt)
    for number in range(6):
        if number == 3:
            ck.save(f"{folder}/ours", state)
            if dist.get_rank() == 0:
                settings = torch.optim.AdamW(module.parameters(), **ADAM).defaults
                if kind == "groups":
                    names = [name for name, _ in module.named_parameters()]
                    up = [name for name in names if ".up." in name]
                    groups = up, [name for name in names if name not in up]
                    settings = [{**settings, "params": group} for group in groups]
                fs.foreign.export(
                    f"{folder}/ours", f"{folder}/theirs", "dcp", net.sources, what="fsdp2", settings=settings
                )
        state, _ = step(state, whole_batch(number))
    return net.state_dict(fs.unshard(state.params))


def go_on_there(folder, kind):
    """A new FSDP2 model and its optimizer take all of it over, and go three steps on."""
    torch.manual_seed(7)
    model = Whole()
    model.scale.zero_()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = [*model.parameters()]
    if kind == "groups":
        up = [x for name, x in model.named_parameters() if ".up." in name]
        groups = [{"params": up}, {"params": [x for name, x in model.named_parameters() if ".up." not in name]}]
    optimizer = torch.optim.AdamW(groups, lr=9.0)
    params, moments = get_state_dict(model, optimizer)
    wanted = {"model": params, "optim": moments}
    torch_dcp.load(wanted, checkpoint_id=f"{folder}/theirs")
    set_state_dict(model, optimizer, model_state_dict=params, optim_state_dict=wanted["optim"])
    assert all(group["lr"] == 1e-2 and group["weight_decay"] == 0.1 for group in optimizer.param_groups)
    assert all(values["step"] == 3 for values in optimizer.state.values())
    for number in range(3, 6):
        model(whole_batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(x) for name, x in model.state_dict().items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_in_fsdp2_with_an_exported_state(kind, tmp_path):
    ours = run_ranks(go_on_here, 2, tmp_path, kind)
    theirs = run_ranks(go_on_there, 2, tmp_path, kind)
    assert {*ours[0]} == {*theirs[0]}
    for found in (*ours, *theirs):
        assert_trees_close(found, ours[0], rtol=1e-5, atol=1e-6)


def test_what_fsdp2_cannot_have_is_refused(tmp_path):
    net = fs.functionalize(Whole(), UNITS)
    layout = fs.plan_layout(net, fs.make_mesh(dp=1))
    ck.save(tmp_path / "lion", fs.init_state(net, fs.optim.lion(1e-3), fs.random.key(0), layout))
    ck.save(tmp_path / "adamw", fs.init_state(net, adamw(), fs.random.key(0), layout))

    def refused(source, settings, format="dcp"):
        with pytest.raises(CheckpointError) as caught:
            fs.foreign.export(tmp_path / source, tmp_path / "out", format, net.sources, what="fsdp2", settings=settings)
        assert not (tmp_path / "out").exists()
        return str(caught.value).splitlines()

    assert refused("adamw", None) == [
        "fs.foreign.export cannot name some tensors.",
        "  settings= is missing: dcp.load restores the optimizer's groups, such as its learning rate",
        "Pass names={ours: theirs}, a unique name for each leaf, with {i} for the blocks of a stack. Pass "
        "settings=optimizer.defaults of the optimizer that loads them.",
    ]
    assert refused("adamw", ADAM, "torch") == [
        f"fs.foreign.export cannot write {tmp_path}/out.",
        "  what='fsdp2' is for format 'dcp', not 'torch'",
        "Change these arguments.",
    ]
    names = [name for name, _ in Whole().named_parameters()]
    odd = [{**ADAM, "lr": torch.tensor(1e-2), "params": names[1:]}, {"params": [names[1], "gone"]}]
    assert refused("adamw", odd)[1:-1] == [
        "  settings of group 0: lr is Tensor, not a plain value",
        "  settings: table.weight is in no group",
        "  settings: gone is in a group, but has no moments",
        "  settings: layers.0.up.weight is in 2 groups",
    ]
    assert (
        "  opt_state.mu.table.weight is float32[13, 6]: supported are Adam's moments, and the state of fs.optim.from_torch"
        in refused("lion", ADAM)
    )


# ------------------------------------------------------------------------------------------------ DDP and safetensors
def save_ddp(folder):
    model, _ = trained(DistributedDataParallel)
    if dist.get_rank() == 0:
        os.makedirs(folder)
        torch.save({"model": model.state_dict(), "epoch": 3}, folder / "ddp.pt")
        plain = {name: x.contiguous() for name, x in model.module.state_dict().items()}
        safetensors.torch.save_file(plain, folder / "model.safetensors")
    return {name: whole(x) for name, x in model.module.state_dict().items()}


def read_weights(path, layout_name, prefix):
    layout = planned(layout_name)
    params = fs.foreign.load_weights(path, layout, NAMES, prefix=prefix)
    state = fs.state_from_params(params, fs.sgd(0.1), fs.random.key(0), layout)
    ck.save(f"{path}.{layout_name}", state)
    return gathered(params)


@pytest.mark.parametrize("layout", ["zero3", "zero1_bf16", "tp", "pp_hsdp"])
def test_weights_of_ddp_go_into_any_layout_and_out(layout, tmp_path):
    params = run_ranks(save_ddp, 2, tmp_path / "ddp")[0]
    for file, prefix in (("ddp.pt", "model."), ("model.safetensors", "")):
        for found in run_ranks(read_weights, 4, tmp_path / "ddp" / file, layout, prefix):
            assert_bitwise_equal(found, stacked(params))
        out = tmp_path / f"{file}.out"
        fs.foreign.export(f"{tmp_path}/ddp/{file}.{layout}", out, "torch", NAMES)
        model = Net()
        model.load_state_dict(torch.load(out, weights_only=True))
        assert_bitwise_equal({**model.state_dict()}, params)


def test_every_rank_refuses_weights_that_do_not_fit(tmp_path):
    torch.save({"table.weight": torch.ones(VOCAB, WIDTH)}, tmp_path / "weights")
    with pytest.raises(RankError) as caught:
        run_ranks(read_weights, 2, tmp_path / "weights", "zero3", "")
    refusals = [caught.value.exceptions[r] for r in range(2)]
    assert all(isinstance(e, CheckpointError) for e in refusals) and str(refusals[0]) == str(refusals[1])
    assert str(refusals[0]).count("is missing") == 3 * LAYERS


def read_by_rank(folder):
    return read_weights(folder / str(dist.get_rank()), "zero3", "")


def test_ranks_that_see_other_weights_refuse_them(tmp_path):
    for r, width in enumerate((WIDTH, WIDTH + 1)):
        torch.save({"table.weight": torch.ones(VOCAB, width)}, tmp_path / str(r))
    with pytest.raises(RankError, match="rank 1 sees other tensors than rank 0"):
        run_ranks(read_by_rank, 2, tmp_path)


# ----------------------------------------------------------------------------------------------------- offline reshard
def draws(key):
    keys = fs.random.split(key, 4)
    shapes = {path: x.shape for path, x in fs.tree.named_leaves(ours()).items()}
    values = {path: fs.random.normal(k, shape) for k, (path, shape) in zip(keys, shapes.items(), strict=True)}
    blocks = {name: values[f"blocks.{name}"] for name in ("w", "b", "down")}
    return {"table": values["table"], "blocks": blocks}


def save_run(folder, layout_name):
    state = fs.init_state(draws, fs.adamw(1e-2), fs.random.key(3), planned(layout_name))
    for x in map(local_of, fs.tree.leaves(state.opt_state)):
        x += 1
    ck.save(folder, state, extra={"seed": 3})


@pytest.mark.parametrize("layout", ["zero3", "tp", "pp_hsdp", "zero0"])
def test_an_offline_reshard_is_what_ranks_of_that_layout_save(layout, tmp_path):
    """Byte by byte, as long as no box is cut to fit into memory."""
    run_ranks(save_run, 2, tmp_path / "two", "zero3")
    run_ranks(save_run, 4, tmp_path / "four", layout)
    want = ck.metadata(tmp_path / "four")
    axes, strategy, _ = LAYOUTS[layout]
    sizes = {axis: want.layout["mesh"].get(axis, 1) for axis in axes}
    made = ck.reshard_checkpoint(tmp_path / "two", tmp_path / "made", sizes, strategy)
    assert made == want
    for name in sorted(os.listdir(tmp_path / "four")):
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "four" / name).read_bytes(), name
