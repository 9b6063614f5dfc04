"""Megatron Core itself, on the CPU and in a process of its own: writes and reads torch_dist directories.

`run` starts `python -m tests.megatron_core` for a list of jobs. The process imports nothing of the library.
Megatron Core names CUDA where it makes buffers and where it waits for the device: `on_cpu` puts the CPU in its place.
Everything else, that is models, optimizers and `dist_checkpointing`, is as it was installed.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

SIZES = {"vocab_size": 128, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 12}
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ARGS = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2,
    "kv_channels": 4, "ffn_hidden_size": 12, "position_embedding_type": "rope", "rotary_base": 10000,
    "rotary_percent": 1.0, "rotary_interleaved": False, "norm_epsilon": 1e-5, "normalization": "RMSNorm",
    "swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "window_size": None,
    "use_rope_scaling": False, "rope_scaling_factor": 8.0, "params_dtype": torch.bfloat16,
}  # fmt: skip
"""What Megatron's training script would save for this model."""


class _OnCpu(TorchFunctionMode):
    """The CPU wherever a CUDA device is named, and CUDA's type names for its tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        named = function is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if named else result


@contextlib.contextmanager
def on_cpu():
    """Run Megatron Core without a GPU."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.current_device", return_value="cpu"))
        stack.enter_context(mock.patch("torch.cuda.synchronize"))
        stack.enter_context(mock.patch("torch.cuda.current_stream"))
        # In torch 2.15 the properties of a saved tensor have strides, which Megatron Core 0.16.1 gives to torch.empty.
        empty = torch.empty
        stack.enter_context(mock.patch("torch.empty", lambda *size, strides=None, **how: empty(*size, **how)))
        # Its states are of CUDA's generators; without dropout none is drawn from.
        fork = mock.patch.object(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext())
        stack.enter_context(fork)
        # 0.16.1 looks this name up where Transformer Engine alone would have defined it.
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        # Torch's Adam, which stands in for Transformer Engine's, has a step beside its moments; it is loaded elsewhere.
        load_tensors = DistributedOptimizer._set_main_param_and_optimizer_states

        def load_but_step(self, param, tensors):
            step = {"step": self._get_main_param_and_optimizer_states(param)["step"]}
            load_tensors(self, param, {**step, **tensors})

        patch = mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", load_but_step)
        stack.enter_context(patch)
        stack.enter_context(_OnCpu())
        yield


def model_of(experts=0, dtype=torch.bfloat16, gpt=None, **fields):
    """A GPT of the local layers of Megatron Core."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    if experts:
        fields = {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": SIZES["intermediate_size"],
            "moe_router_topk": 2,
        } | fields
    if fields.get("activation_func"):
        fields["activation_func"] = getattr(F, fields["activation_func"])
    config = TransformerConfig(**{
        "num_layers": SIZES["layers"], "hidden_size": SIZES["dim"], "num_attention_heads": SIZES["heads"],
        "num_query_groups": SIZES["kv_heads"], "ffn_hidden_size": SIZES["intermediate_size"], "gated_linear_unit": True,
        "activation_func": F.silu, "normalization": "RMSNorm", "add_bias_linear": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "use_cpu_initialization": True, "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype, "pipeline_dtype": dtype, "attention_softmax_in_fp32": True, "init_method_std": 0.3, **fields,
    })  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=experts or None, normalization=config.normalization, qk_layernorm=config.qk_layernorm,
        qk_l2_norm=config.qk_l2_norm,
    )  # fmt: skip
    options = {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope", **(gpt or {})}
    return GPTModel(config, spec, SIZES["vocab_size"], 16, **options).to(dtype)


def run_of(model, tokens, steps):
    """The model with Megatron's data parallelism and distributed optimizer, after some steps."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    betas = dict(zip(("adam_beta1", "adam_beta2"), SETTINGS["betas"], strict=True))
    config = OptimizerConfig(
        optimizer="adam", lr=SETTINGS["lr"], min_lr=0.0, weight_decay=SETTINGS["weight_decay"], bf16=True,
        params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=1.0, **betas,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(config, [ddp])
    for _ in range(steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss_of(ddp, tokens).backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return optimizer


def loss_of(model, tokens):
    """The mean loss of the next token."""
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()


def state_of(model, optimizer, metadata, **options):
    """The sharded state dict that Megatron saves or fills."""
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    return state | {"optimizer": optimizer.sharded_state_dict(state["model"], metadata=metadata, **options)}


def values_of(model, optimizer):
    """Weights, main parameters and moments by name of the module's parameter."""
    result = {f"weight.{name}": p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        inner = optimizer.chained_optimizers[0]
        held = inner._get_main_param_and_optimizer_states(p)
        result |= {f"{kind}.{name}": held[kind].detach().view(p.shape) for kind in ("param", "exp_avg", "exp_avg_sq")}
    return result


def write(folder, tokens, *, sharding="fully_reshardable", experts=0, args=None, steps=3, gpt=None):
    """Train some steps, save, and return the loss and all values."""
    from megatron.core import dist_checkpointing

    model = model_of(experts, gpt=gpt)
    optimizer = run_of(model, tokens, steps)
    metadata = {"distrib_optim_sharding_type": sharding, "chained_optim_avoid_prefix": True}
    metadata["singleton_local_shards"] = False
    state = state_of(model, optimizer, metadata)
    state |= {"iteration": steps, "checkpoint_version": 3.0}
    state["args"] = argparse.Namespace(**{**ARGS, **(args or {})})
    os.makedirs(folder)
    dist_checkpointing.save(state, folder, content_metadata=metadata)
    return values_of(model, optimizer)


def read(folder, tokens, *, experts=0, gpt=None):
    """Fill a model and an optimizer from a directory, and return all values and parameter groups.

    The optimizer has taken a step: without Transformer Engine an empty one has no state dict.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    model = model_of(experts, gpt=gpt)
    optimizer = run_of(model, tokens, 1)
    common = dist_checkpointing.load_common_state_dict(folder)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    state = state_of(model, optimizer, metadata, is_loading=True)
    loaded = dist_checkpointing.load(state, folder)
    model.load_state_dict(loaded["model"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    after = values_of(model, optimizer)
    result = {**after, "groups": groups, "iteration": loaded["iteration"], "args": vars(loaded["args"])}
    if "opt_param_scheduler" in loaded:
        schedule = OptimizerParamScheduler(
            optimizer, 0.0, SETTINGS["lr"], 0.0, 0, 100, "cosine", 0.1, 0.1, 1, "constant",
            override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=False,
        )  # fmt: skip
        schedule.load_state_dict(loaded["opt_param_scheduler"])
        result["schedule"] = schedule.num_steps
    return result


def losses(folder, tokens, variants, *, experts=0):
    """The loss in float32 of the main parameters in a directory, with each variant of the configuration."""
    from megatron.core import dist_checkpointing

    result = []
    for fields in variants:
        model = model_of(experts, torch.float32, **fields)
        state = model.sharded_state_dict()
        # Only shapes are asked for: main parameters are stored under the name of the optimizer's tensor.
        for entry in _tensors(state):
            entry.key = f"optimizer.state.param.{entry.key}"
        loaded = dist_checkpointing.load({"model": state}, folder, strict="log_unexpected")
        model.load_state_dict(loaded["model"], strict=False)
        result.append(float(loss_of(model, tokens)))
    return result


def _tensors(state):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    return [entry for entry in state.values() if isinstance(entry, ShardedTensor | ShardedTensorFactory)]


def main():
    """Run the jobs in argv: a file for the results, and for each job a function and its arguments."""
    file, tokens, jobs = json.loads(sys.argv[1])
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{file}.store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    functions = {"write": write, "read": read, "losses": losses}
    results = []
    with on_cpu():
        for seed, (name, folder, options) in enumerate(jobs):
            torch.manual_seed(seed)
            results.append(functions[name](folder, torch.tensor(tokens), **options))
    torch.save(results, file)
    dist.destroy_process_group()


def run(file, tokens, jobs):
    """Run jobs in one process of their own, and return what each returned."""
    given = json.dumps([str(file), tokens.tolist(), [(name, str(folder), options) for name, folder, options in jobs]])
    command = [sys.executable, "-W", "ignore", "-m", "tests.megatron_core", given]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(file, weights_only=False)


if __name__ == "__main__":
    main()
