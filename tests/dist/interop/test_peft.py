"""LoRA adapters of PEFT through functionalize on two ranks, against PEFT and torch's AdamW on one process."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import fsharding as fs
from fsharding.testing import assert_trees_close, run_ranks
from tests.helpers import refusal, token_batch
from tests.hf_configs import SIZES

STEPS = 3
INSIDE = "base_model.model"
UNITS = (f"{INSIDE}.model.embed_tokens", f"{INSIDE}.model.layers.*", (f"{INSIDE}.model.norm", f"{INSIDE}.lm_head"))


def prepared():
    """A Llama with adapters that change its outputs, and the function that makes the model without them."""
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    import peft
    import transformers

    def base():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))

    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base(), config), base


def loss_of(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


def adapters_on_ranks(folder, strategy):
    """Losses, the leaves with main parameters, local and full sizes of an adapter; rank 0 saves the adapters."""
    module, _ = prepared()
    net, opt, mesh = fs.functionalize(module, UNITS), fs.adamw(1e-2, b2=0.999, eps=1e-4), fs.make_mesh(dp=2)
    layout = fs.plan_layout(net, mesh, strategy=strategy)
    state = fs.init_state(net, opt, fs.random.key(0), layout)
    before = fs.unshard(state.params)

    def loss(params, batch):
        logits = net(params, input_ids=batch["tokens"], use_cache=False).logits
        return loss_of(logits, batch), batch["targets"].numel()

    step, losses = fs.make_train_step(loss, opt), []
    for _ in range(STEPS):
        state, metrics = step(state, token_batch(0, vocab=40, mesh=mesh))
        losses.append(metrics.loss.item())
    full = fs.unshard(state.params)
    changed = {
        path
        for (path, a), b in zip(fs.tree.named_leaves(before).items(), fs.tree.leaves(full), strict=True)
        if not torch.equal(a, b)
    }
    moments = sum(x.to_local().numel() for x in fs.tree.leaves(state.opt_state.mu) if x is not None)
    module.load_state_dict(net.state_dict(full))
    if fs.is_rank0():
        module.save_pretrained(folder)
    return losses, changed, moments


def on_one_process():
    module, _ = prepared()
    opt = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-2, weight_decay=0.0, eps=1e-4)
    batch, losses = token_batch(0, vocab=40), []
    for _ in range(STEPS):
        loss = loss_of(module(input_ids=batch["tokens"], use_cache=False).logits, batch) / batch["targets"].numel()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, module


@pytest.mark.parametrize("level", [1, 3])
def test_adapters_train_and_are_saved_as_by_peft_on_one_process(level, tmp_path):
    import peft
    from safetensors.torch import load_file

    ranks = run_ranks(adapters_on_ranks, 2, str(tmp_path), fs.zero(level), timeout=60.0)
    want, module = on_one_process()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for losses, changed, _ in ranks:
        assert_trees_close(losses, want, rtol=1e-5, atol=0)
        assert len(changed) == 4 and all("lora_" in path for path in changed)
    # Moments are those of adapters alone, and each rank has its half.
    assert sum(moments for _, _, moments in ranks) == sum(p.numel() for p in trained.values())
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == {name.replace(".default", "") for name in trained}
    for name, p in trained.items():
        assert_trees_close(saved[name.replace(".default", "")], p.detach(), rtol=1e-4, atol=1e-5, what=name)
    again, batch = peft.PeftModel.from_pretrained(prepared()[1](), tmp_path), token_batch(0, vocab=40)
    with torch.no_grad():
        found, expected = (m(input_ids=batch["tokens"], use_cache=False).logits for m in (again, module))
    assert_trees_close(found, expected, rtol=1e-4, atol=1e-5)


def test_adapters_of_single_parameters_are_refused_by_name():
    """PEFT puts them in by a parametrization of another module, in each forward."""
    import peft

    module = peft.get_peft_model(prepared()[1](), peft.LoraConfig(r=2, target_parameters=["mlp.up_proj.weight"]))
    for units in ((UNITS,), ()):
        assert refusal(fs.functionalize, module, *units) == (
            "fs.functionalize cannot run adapters that replace parameters in the forward.\n"
            f"  {INSIDE}.model.layers.0.mlp.up_proj is PEFT's ParamWrapper of weight\n"
            f"  {INSIDE}.model.layers.1.mlp.up_proj is PEFT's ParamWrapper of weight\n"
            "Adapt layers instead: target_modules=[...] without target_parameters."
        )
