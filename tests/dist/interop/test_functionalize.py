"""Modules of others on real ranks: losses, and what is gathered, against the module and torch's AdamW on one process."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsharding as fs
from fsharding.mesh.device_mesh import data_rank_and_size
from fsharding.sharding.named_sharding import Local, to_local
from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from tests.helpers import full, token_batch
from tests.modules import UNITS, VOCAB, Block, Net, Shared

STEPS = 5


def net_loss(net, key=None):
    def loss(params, batch):
        logits = net(params, batch["tokens"], random_key=key)["logits"]
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"), logits[
            ..., 0
        ].numel()

    return loss


def mine(batch, mesh):
    index, count = data_rank_and_size(mesh)
    return {name: x.chunk(count)[index] for name, x in batch.items()}


EPS = 1e-4  # so that parameters whose gradients are rounding errors move by little
"""Of AdamW, here and there."""


def torch_losses(module, logits_of, batch):
    """Before each step, and after the last one; the module is trained."""
    opt, losses = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01, eps=EPS), []
    for _ in range(STEPS):
        loss = F.cross_entropy(logits_of(module).flatten(0, -2), batch["targets"].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return [*losses, F.cross_entropy(logits_of(module).flatten(0, -2), batch["targets"].flatten()).item()]


def our_losses(net, loss, batch, layout, **settings):
    """Before each step, and after the last one; and the state after it."""
    opt = fs.adamw(1e-2, b2=0.999, weight_decay=0.01, eps=EPS)
    states, losses = [fs.init_state(net, opt, fs.random.key(0), layout)], []
    step = fs.make_train_step(loss, opt, **settings)
    for _ in range(STEPS + 1):
        state, metrics = step(states[-1], mine(batch, layout.mesh))
        states = [states[-1], state]
        losses.append(metrics.loss.item())
    return losses, states[0]


def train_net(units):
    mesh, batch = fs.make_mesh(dp=2), token_batch(1, vocab=VOCAB)
    torch.manual_seed(0)
    module = Net()
    net = fs.functionalize(module, units)
    frugal = fs.functionalize(module, units, policy=fs.policies.nothing_saveable)
    found = {}
    for name, strategy, precision, one in (
        ("zero1", fs.zero(1), fs.FP32, net),
        ("zero3", fs.zero(3), fs.FP32, net),
        ("remat", fs.zero(3), fs.FP32, frugal),
        ("bf16", fs.zero(3), fs.BF16, net),
    ):
        layout = fs.plan_layout(one, mesh, strategy=strategy, precision=precision)
        with fs.debug.record_collectives() as calls:
            losses, state = our_losses(one, net_loss(one), batch, layout)
        found[name] = losses, len(calls[0].gathers), calls[0].peak_units
        if name == "remat":
            sums = torch.func.grad(lambda p: net_loss(frugal)(p, mine(batch, mesh))[0])(
                fs.tree.map(to_local, state.params)
            )
            _, grads = fs.value_and_grad(net_loss(net), mean=False)(state.params, mine(batch, mesh))
            ours = fs.tree.map(lambda x: x.to_local(), grads)
            theirs = fs.tree.map(lambda x: x.value, sums, is_leaf=lambda x: isinstance(x, Local))
            assert_trees_close(theirs, ours, rtol=1e-5, atol=1e-5, what="torch.func.grad")
    return found, torch_losses(module, lambda m: m(batch["tokens"])["logits"], batch)


@pytest.mark.parametrize("units", [UNITS, "layers.*"], ids=str)
def test_a_module_trains_as_on_one_process(units):
    found, want = run_ranks(train_net, 2, units, timeout=60.0)[0]
    for name, (losses, _, _) in found.items():
        assert_trees_close(losses, want, rtol=2e-2 if name == "bf16" else 1e-5, what=name)
    assert found["zero1"][0] == found["zero3"][0] == found["remat"][0]
    # Five units, all of them but the last and the embedding twice; the root is one number, which every rank has. Where
    # only blocks are units the root has all else and stays: it and three blocks, each twice. What comes ahead takes no
    # buffer as long as it is another rank's memory that is read.
    for name in ("zero3", "remat"):
        gathers, alive = found[name][1:]
        assert gathers == 8 and alive <= (2 if units == UNITS else 3), name


def train_shared(folder):
    mesh, x = fs.make_mesh(dp=2), torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    module = Shared()
    net = fs.functionalize(module, ("steps.*", "wide.*", "back.*"))
    layout = fs.plan_layout(net, mesh)

    def loss(params, batch):
        return F.cross_entropy(net(params, batch["x"]), batch["targets"], reduction="sum"), len(batch["x"])

    batch = {"x": x, "targets": torch.arange(4)}
    losses, state = our_losses(net, loss, batch, layout)
    fs.checkpoint.save(folder, state)
    again = fs.checkpoint.load(folder, layout.with_strategy(fs.zero(1)))
    assert_bitwise_equal(fs.unshard(again.params), fs.unshard(state.params), "from a checkpoint")
    return losses, torch_losses(module, lambda m: m(x), batch)


def test_shared_blocks_and_weights_train_as_on_one_process(tmp_path):
    losses, want = run_ranks(train_shared, 2, str(tmp_path / "ckpt"), timeout=60.0)[0]
    assert_trees_close(losses, want, rtol=1e-5)


def train_with_dropout():
    mesh, batch = fs.make_mesh(dp=2), token_batch(1, vocab=VOCAB)
    torch.manual_seed(0)
    module, key = Net(p=0.5), fs.random.key(3)
    found = []
    for strategy, policy in ((0, "save_except_gathered"), (3, "save_except_gathered"), (3, "nothing_saveable")):
        net = fs.functionalize(module, UNITS, policy=getattr(fs.policies, policy))
        layout = fs.plan_layout(net, mesh, strategy=fs.zero(strategy))
        found.append(our_losses(net, net_loss(net, key), batch, layout)[0])
    state = fs.init_state(net, fs.sgd(0.1), key, layout)
    alike = net(state.params, batch["tokens"], random_key=key)["logits"]
    return found, alike.detach()


def test_dropout_is_a_function_of_the_key_under_every_strategy_and_policy():
    (found, first), (_, second) = run_ranks(train_with_dropout, 2, timeout=60.0)
    assert found[0] == found[1] == found[2]
    assert not torch.allclose(first, second), "ranks along data axes draw masks of their own"


class Wide(nn.Module):
    """Its output says which hidden values its first dropout has kept; a second one follows after the region."""

    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 1, bias=False)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)
        with torch.no_grad():
            self.up.weight.zero_()
            self.up.bias.fill_(0.5)
            self.down.weight.copy_(2.0 ** torch.arange(hidden))

    def forward(self, x):
        kept = self.down(self.inner(self.up(x)))
        return kept, self.outer(torch.ones_like(x)), self.down(self.inner(self.up(x)))


def draw_inside_regions(hidden):
    net = fs.functionalize(
        nn.Sequential(Wide(hidden)), "*", policy=fs.policies.nothing_saveable, roles={"*.up": "column", "*.down": "row"},
        names={"up.weight": ("mlp", None), "up.bias": ("mlp",), "down.weight": (None, "mlp")},
    )  # fmt: skip
    layout, key, x = fs.plan_layout(net, fs.make_mesh(tp=2)), fs.random.key(0), torch.ones(64, 4)
    state = fs.init_state(net, fs.sgd(0.1), key, layout)

    def loss(params):
        outs = net(params, x, random_key=key)
        return (outs[0].sum(), 1), [out.detach() for out in outs]

    (_, outs), grads = fs.value_and_grad(loss, has_aux=True)(state.params)
    return outs, fs.tree.map(lambda g: g.full_tensor(), grads)


@pytest.mark.parametrize("hidden", [5, 4])
def test_ranks_of_tp_draw_apart_inside_a_region_and_alike_outside(hidden):
    (outs, grads), (others, _) = run_ranks(draw_inside_regions, 2, hidden, timeout=60.0)
    assert_bitwise_equal(outs, others, "on both ranks")
    first, outer, second = outs
    assert 0.3 < (outer > 0).float().mean() < 0.7
    bits = (first.long() >> torch.arange(hidden)) & 1
    again = (second.long() >> torch.arange(hidden)) & 1
    alike = (bits.T[:, None] == bits.T).all(-1)
    assert torch.equal(alike, torch.eye(hidden, dtype=torch.bool)), "every hidden value has a mask of its own"
    assert not torch.equal(bits, again), "and another one in each region"
    assert torch.equal(grads["down"]["weight"][0, 0], bits.sum(0).float()), "recomputed with the same masks"


def draw_on_meta(axes, ranks):
    with torch.device("meta"):
        module = Net()

    def reset(part):
        part.scale.fill_(0.5) if isinstance(part, Block) else part.heat.fill_(1) if isinstance(part, Net) else None
        if not isinstance(part, Block | Net):
            part.reset_parameters()

    net = fs.functionalize(module, UNITS, reset=reset)
    mesh = fs.make_mesh(**axes, ranks=ranks)
    layout = fs.plan_layout(net, mesh)
    return fs.tree.map(lambda x: x.full_tensor(), fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout).params)


def test_parameters_on_the_meta_device_are_drawn_alike_in_every_layout():
    whole = draw_on_meta({"dp": 1}, None)
    for rank, cut in enumerate(run_ranks(draw_on_meta, 2, {"dp": 2}, None, timeout=60.0)):
        assert_bitwise_equal(cut, whole, f"rank {rank}")
    up = whole["layers"]["up"]["weight"]
    assert not torch.equal(up[0], up[1]) and up.std() > 0.1


# ------------------------------------------------------------------------------------------------------- Hugging Face
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", SMALL),
    "tied llama": ("Llama", {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "pad_token_id": 3}),
    "odd llama": ("Llama", {**SMALL, "hidden_size": 36, "intermediate_size": 31, "head_dim": 8}),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 8, "vocab_size": 65, "tie_word_embeddings": True}),
    "mixtral, experts": ("Mixtral", {**SMALL, "num_local_experts": 4}),
    "qwen3_moe, experts": ("Qwen3Moe", {**SMALL, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 16}),
    "qwen3_moe, mixed": ("Qwen3Moe", {**SMALL, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
                             "moe_intermediate_size": 16, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "gpt2": ("GPT2", GPT2),
    "mistral": ("Mistral", {**SMALL, "sliding_window": None}),
    "gemma": ("Gemma", {**SMALL, "head_dim": 8}),
    "gemma2": ("Gemma2", {**SMALL, "head_dim": 8, "sliding_window": 8}),
    "phi": ("Phi", SMALL),
    "phi3": ("Phi3", {**SMALL, "pad_token_id": 0, "sliding_window": None}),
}  # fmt: skip


def logits_of(module, tokens, *params):
    return module(*params, tokens, use_cache=False).logits


def family_loss(net):
    def loss(params, batch):
        logits = logits_of(net, batch["tokens"], params)
        return fs.ops.cross_entropy(logits, batch["targets"]).sum(), batch["targets"].numel()

    return loss


def check_module(name, module, batch, want, losses, trained, folder):
    """The module in one piece: its logits, its losses, and its weights from files, where it never has any memory."""
    import transformers

    net = fs.functionalize(module)
    for axes in ({"dp": 2}, {"tp": 2}) if net.roles.roles else ({"dp": 2},):
        layout = fs.plan_layout(net, fs.make_mesh(**axes), tp="replicate")  # of Phi-3 it shards the vocabulary alone
        assert {axis for leaf in layout.leaves for axis in leaf.params.spec.all_axes} == {*axes}
        state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
        logits = logits_of(net, batch["tokens"], state.params).detach()
        assert_trees_close(logits, want, rtol=1e-5, atol=1e-6, what=f"logits of {name} on {axes}")
        found, after = our_losses(net, family_loss(net), batch, layout)
        assert_trees_close(found, losses, rtol=1e-5, what=f"losses of {name} on {axes}")
        named = net.state_dict(fs.unshard(after.params))
        ours = {n: named[n] for n in trained}
        assert_trees_close(ours, trained, rtol=1e-5, atol=1e-5, what=f"{name} on {axes} after {STEPS} steps")
    if torch.distributed.get_rank() == 0:
        module.save_pretrained(folder)
    torch.distributed.barrier()
    with torch.device("meta"):
        hollow = fs.functionalize(transformers.AutoModelForCausalLM.from_config(module.config))
    params = fs.hf.load(folder, layout, hollow.files)
    assert_bitwise_equal(params, state.params, "read from files")
    if hollow.files == hollow.sources:
        assert_bitwise_equal(fs.foreign.load_weights(folder, layout, hollow.sources), params, "by load_weights")
    entries = json.loads((folder / "config.json").read_text())
    for kind, names in (("sources", hollow.sources), ("files", hollow.files)):
        there = fs.hf.save(Path(f"{folder} {kind}"), params, entries, names=names).path
        back = transformers.AutoModelForCausalLM.from_pretrained(there)
        assert_bitwise_equal(dict(back.named_parameters()), dict(module.named_parameters()), f"{name} from {kind}")
    assert_bitwise_equal(logits_of(hollow, batch["tokens"], params).detach(), logits, "buffers")


def check_model(name, module, batch, losses, axes):
    """The module in stages."""
    model = fs.model_from_module(module)
    stages = fs.pipeline.stages_of(model, fs.pipeline.plan_schedule("1f1b", 2, 2)) if "pp" in axes else None
    layout = fs.plan_layout(model, fs.make_mesh(**axes), stages=stages)
    with fs.set_mesh(layout.mesh):
        part = fs.ops.cut_sequence(batch)
    found, _ = our_losses(model, model, part, layout, microbatches=2)
    assert_trees_close(found, losses, rtol=1e-5, what=f"losses of {name} in stages on {axes}")


def train_families(names, folder):
    import transformers

    for name in names:
        kind, sizes = FAMILIES[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes)
        module, batch = transformers.AutoModelForCausalLM.from_config(config), token_batch(1, vocab=64)
        reference, tokens = copy.deepcopy(module), batch["tokens"]
        want = logits_of(module, tokens).detach()
        losses = torch_losses(reference, lambda m, t=tokens: logits_of(m, t), batch)
        trained = {n: p.detach() for n, p in reference.named_parameters()}
        check_module(name, module, batch, want, losses, trained, Path(folder, name))
        if fs.hf.families.FAMILIES[module.config.model_type].parts is None:
            continue
        check_model(name, module, batch, losses, {"pp": 2})
        check_model(name, module, batch, losses, {"cp": 2})
    check_model(name, module, batch, losses, {"tp": 2})


def test_families_of_hugging_face(tmp_path):
    run_ranks(train_families, 2, ["gpt2", "odd llama", "qwen3_moe, mixed", "qwen3"], str(tmp_path), timeout=110.0)


def test_families_with_other_embeddings_norms_and_layers(tmp_path):
    run_ranks(train_families, 2, ["gemma2", "phi", "phi3", "gemma"], str(tmp_path), timeout=110.0)


@full
def test_other_families_of_hugging_face(tmp_path):
    run_ranks(
        train_families,
        2,
        ["mixtral, experts", "qwen3_moe, experts", "llama", "qwen2", "mistral", "tied llama"],
        str(tmp_path),
        timeout=110.0,
    )


class Mixed(nn.Module):
    """A unit that gets a float32 buffer of the root as an input."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(6, 8), nn.ModuleList(Scaled() for _ in range(2))
        self.register_buffer("scale", torch.linspace(0.1, 2.0, 8))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=self.scale)
        return x


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x, *, scale):
        return x + torch.tanh(self.up(x)) * scale


def train_as_fsdp2():
    torch.manual_seed(0)
    module, mesh = Mixed(), fs.make_mesh(dp=2)
    inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    net = fs.functionalize(module, "layers.*")
    layout = fs.plan_layout(net, mesh, strategy=fs.zero(3), precision=fs.BF16)
    state = fs.init_state(net, fs.sgd(0.1), fs.random.key(0), layout)
    mine = inputs.chunk(2)[data_rank_and_size(mesh)[0]]
    (loss, _), grads = fs.value_and_grad(
        lambda params: (net(params, mine).float().square().sum(), 1), precision=fs.BF16, mean=False
    )(state.params)
    ours = loss.item(), net.state_dict(fs.unshard(grads))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    for part in (*module.layers, module):
        fully_shard(part, mesh=mesh["dp"], mp_policy=policy)
    total = module(mine).float().square().sum()
    total.backward()
    sums = {name: 2 * p.grad.full_tensor() for name, p in module.named_parameters()}  # FSDP2 averages
    dist.all_reduce(total)
    return ours, (total.item(), sums)


def test_inputs_are_cast_where_fsdp2_casts_them():
    for (loss, grads), (want, sums) in run_ranks(train_as_fsdp2, 2, timeout=60.0):
        assert loss == want
        for name, expected in sums.items():
            assert_trees_close(grads[name], expected, rtol=1e-6, atol=1e-7, what=name)
