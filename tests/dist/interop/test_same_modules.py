"""First values that ranks hold in full and that differ: refused by leaf under every strategy, or rank 0's for all."""

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

import fsharding as fs
from fsharding.base.errors import ArgumentError, ConfigError
from fsharding.testing import assert_bitwise_equal, run_ranks
from tests.helpers import mesh_of, refusal

MESHES = {
    "zero0": ({"dp": 2}, fs.zero(0)),
    "zero3": ({"dp": 2}, fs.zero(3)),
    "replica": ({"replica": 2}, fs.zero(3)),
    "tp": ({"tp": 2}, fs.zero(1)),
}
NAMES = {"*.0.weight": ("mlp", None), "*.0.bias": ("mlp",), "*.1.weight": (None, "mlp"), "*": None}
ROLES = {"layers.*.0": "column", "layers.*.1": "row"}
X = torch.linspace(-1, 1, 8).view(2, 4)


class Net(nn.Module):
    """Two equal blocks that are stacked, an end that is not, a constant, and a buffer that the forward writes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.norm.running_mean = torch.randn(4)
        self.register_buffer("scale", torch.randn(4))

    def forward(self, x):
        x = self.norm(self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale[:2]


UNITS = ("embed", "layers.*", "head")
STACKS = {
    f"layers.{i}.{kind}": [f"layers.{row}.{i}.{kind}" for row in (0, 1)] for i in (0, 1) for kind in ("weight", "bias")
}
ENDS = [f"{name}.{kind}" for name in ("embed", "head") for kind in ("weight", "bias")]


def told(*rows: torch.Tensor) -> str:
    """63 bits of the sha256 of the bytes of all rows, computed here."""
    number = int.from_bytes(hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in rows)).digest()[:8], "big")
    return f"{number >> 1:016x}"


def rank_of() -> int:
    return torch.distributed.get_rank()


def module_refusals(case: str) -> dict[str, str]:
    axes, strategy = MESHES[case]
    mesh, net = mesh_of(axes), fs.functionalize(Net(rank_of()), UNITS, names=NAMES, roles=ROLES)
    layout, opt, key = fs.plan_layout(net, mesh, strategy=strategy), fs.sgd(0.1), fs.random.key(0)
    return {
        "fs.init_state": refusal(fs.init_state, net, opt, key, layout, kind=ConfigError),
        "fs.setup": refusal(fs.setup, net, _no_loss, opt, key, strategy, mesh=mesh, kind=ConfigError),
    }


def _no_loss(params, batch, buffers):
    raise AssertionError("is not called")


@pytest.mark.parametrize("case", [*MESHES])
def test_modules_that_differ_are_refused_by_leaf(case):
    nets = [dict(Net(seed).state_dict()) for seed in range(2)]
    wanted = {path: [[net[name] for name in STACKS.get(path, [path])] for net in nets] for path in (*STACKS, *ENDS)}
    texts = run_ranks(module_refusals, 2, case)
    assert texts[0] == texts[1]
    for text in texts[0].values():
        head, *rows, mend = text.split("\n")
        assert head == "fs.init_state got different first values on different ranks."
        for path, (zero, one) in wanted.items():
            row = next(row for row in rows if row.startswith(f"  params.{path}: "))
            assert f"checksum {told(*one)}, rank 0 has" in row and row.endswith(f"of checksum {told(*zero)}")
        assert [row.split(":")[0] for row in rows[8:]] == ["  buffers.scale", "  buffers.norm.running_mean"]
        assert "torch.manual_seed(0)" in mend and 'pass sync="rank0", which' in mend


class Staged(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.layers = nn.Embedding(5, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 5)


PARTS = fs.hf.families.Parts(
    embed=lambda net, batch: net.embed(batch["x"]),
    block=lambda net, layer, x: layer(x),
    head=lambda net, x, batch: (net.head(x).square().sum(), batch["x"].numel()),
)


def stages(seeds, sync):
    model = fs.model_from_module(Staged(seeds[rank_of()]), ("embed", "layers.*", "head"), PARTS)
    start = lambda: fs.setup(model, None, fs.sgd(0.1), fs.random.key(0), mesh=mesh_of({"pp": 2}), sync=sync)  # noqa: E731
    if sync is None:
        return refusal(start, kind=ConfigError)
    state, step = start()
    _, metrics = step(state, {"x": torch.arange(4).view(2, 2)})
    return fs.unshard(state.params), float(metrics.loss)


def test_stages_of_modules_that_differ_are_refused_or_get_those_of_rank_0():
    for text in run_ranks(stages, 2, (0, 1), None):
        assert text.count("\n  params.") == 5 and "blocks.weight: rank 1 has float32[2, 4, 4]" in text
    net = Staged(3)
    x = net.embed(torch.arange(4).view(2, 2))
    loss = net.head(net.layers[1](net.layers[0](x))).square().sum().detach() / 4
    for params, found in run_ranks(stages, 2, (3, 4), "rank0"):
        assert_bitwise_equal(params["embed"]["embed"]["weight"], net.embed.weight.detach())
        assert_bitwise_equal(params["blocks"]["weight"], torch.stack([x.weight.detach() for x in net.layers]))
        assert_bitwise_equal(params["head"]["head"]["weight"], net.head.weight.detach())
        assert found == pytest.approx(float(loss), rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- sync
def synced(case: str, others: str) -> Any:
    axes, strategy = MESHES[case]
    net = Net(rank_of())
    if rank_of() and others == "meta":
        net.to("meta")
        net.scale = torch.zeros(4)
    pure = fs.functionalize(
        net, UNITS, names=NAMES, roles=ROLES, reset=lambda module: None if others != "meta" else _zeros(module)
    )

    def loss(params, batch, buffers):
        y, buffers = pure(params, batch["x"], buffers=buffers)
        return (y.square().sum(), y.numel()), buffers

    state, step = fs.setup(
        pure, loss, fs.sgd(0.1), fs.random.key(0), strategy, mesh=mesh_of(axes), sync="rank0"
    )  # fmt: skip
    first = pure.state_dict(fs.unshard(state.params), state.buffers)
    state, metrics = step(state, {"x": X})
    return first, float(metrics.loss), pure.state_dict(fs.unshard(state.params), state.buffers)


def _zeros(module: nn.Module) -> None:
    for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        torch.nn.init.zeros_(x)


@pytest.mark.parametrize(
    ("case", "others"), [("zero0", "seed"), ("zero3", "meta"), ("replica", "seed"), ("tp", "seed"), ("tp", "meta")]
)
def test_sync_starts_all_ranks_from_rank_0(case, others):
    net = Net(0)
    start = {name: x.clone() for name, x in net.state_dict().items()}
    loss = net(X).square().mean()  # equal rows on all ranks: their mean is that of one
    loss.backward()
    with torch.no_grad():
        for x in net.parameters():
            x -= 0.1 * x.grad
    for first, found, after in run_ranks(synced, 2, case, others):
        assert_bitwise_equal(first, {name: start[name] for name in first})
        assert found == pytest.approx(float(loss.detach()), rel=1e-5)
        for name, x in net.state_dict().items():
            torch.testing.assert_close(after[name], x, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------- leaves of every other kind
def leaves_of_ranks() -> dict[str, str]:
    """What each way to begin with tensors, keys or leaves that differ ends with."""
    rank, mesh, opt, key = rank_of(), mesh_of({"dp": 2}), fs.sgd(0.1), fs.random.key(0)
    tensors = {"same": torch.ones(4), "w": torch.full((4,), float(rank)), "n": torch.full((), rank)}
    found: dict[str, str] = {}
    for strategy in (fs.zero(0), fs.zero(3)):
        layout = fs.plan_layout(tensors, mesh, strategy=strategy)
        found[f"shard {strategy}"] = refusal(fs.shard, tensors, layout, kind=ConfigError)
    got = fs.unshard(fs.shard(tensors, layout, sync="rank0"))
    assert_bitwise_equal(got, {"same": torch.ones(4), "w": torch.zeros(4), "n": torch.zeros((), dtype=torch.int64)})
    found["sync"] = refusal(fs.shard, tensors, layout, sync="rank1", kind=ArgumentError)

    init = lambda key: {"w": fs.random.normal(key, (4,), std=1.0 + rank)}  # noqa: E731
    plan = fs.plan_layout(init(key), mesh)
    for sync in (None, "rank0"):
        found[f"draws {sync}"] = refusal(fs.init_state, init, opt, key, plan, sync=sync, kind=ConfigError)
    found["key"] = refusal(
        fs.init_state, lambda key: fs.random.zeros((4,)), opt, fs.random.key(rank), fs.plan_layout(torch.zeros(4), mesh),
        kind=ConfigError,
    )  # fmt: skip

    # Under zero(0) each rank holds all of a leaf, which nobody has compared.
    layout = fs.plan_layout({"w": torch.zeros(4)}, mesh, strategy=fs.zero(0))
    mine = {"w": layout.params["w"].to_dtensor(tensors["w"], (4,))}
    found["state_from_params"] = refusal(fs.state_from_params, mine, opt, key, layout, kind=ConfigError)
    loss = lambda params, batch: fs.gather_unit(params)["w"].square().sum()  # noqa: E731
    state, step = fs.setup({"w": torch.zeros(4)}, loss, opt, key, "zero0", mesh=mesh)
    found["replace"] = refusal(step, state.replace(params=mine), torch.ones(2), kind=ConfigError)
    ours = {"w": layout.params["w"].to_dtensor(torch.ones(4), (4,))}
    _, metrics = step(state.replace(params=ours), torch.ones(2))
    assert float(metrics.loss) == 4.0  # of four ones, the same on both ranks
    return found


def test_tensors_draws_and_leaves_that_differ_are_refused():
    zeros, ones = (told(torch.full((4,), float(rank))) for rank in range(2))
    for found in run_ranks(leaves_of_ranks, 2):
        row = f"w: rank 1 has float32[4] of checksum {ones}, rank 0 has float32[4] of checksum {zeros}"
        for strategy in ("zero0", "zero3"):
            head, *rows, mend = found[f"shard {strategy}"].split("\n")
            assert head == "fs.shard got different first values on different ranks."
            assert rows == [
                f"  n: rank 1 has int64[] of checksum {told(torch.ones((), dtype=torch.int64))}, rank 0 has int64[] of"
                f" checksum {told(torch.zeros((), dtype=torch.int64))}",
                f"  {row}",
            ]
            assert mend.endswith('Or pass sync="rank0", which sends the values of rank 0 to all.')
        assert found["sync"].startswith("fs.shard got sync='rank1'.\nGive sync=\"rank0\"")
        for sync in (None, "rank0"):
            assert (
                "params.w: rank 1 has LazyTensor(" in found[f"draws {sync}"] and "scale=2.0" in found[f"draws {sync}"]
            )
        assert "\n  key: rank 1 has [" in found["key"]
        for call, function in (("state_from_params", "fs.state_from_params"), ("replace", "train step")):
            head, *rows, mend = found[call].split("\n")
            assert head == f"{function} got different values of the same leaves on different ranks."
            assert rows == [f"  params.{row}"] and mend.endswith('sends those of rank 0 with sync="rank0".')
