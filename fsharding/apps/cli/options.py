"""Options of each subcommand, with their help as docstrings and comments; imported before torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

__all__ = [
    "DoctorConfig", "ExportConfig", "GenerateConfig", "InspectConfig", "PlanConfig", "ReshardConfig",
    "TrainConfig",
]  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """Train a decoder on bytes or tokens."""

    out: Path  # directory for metrics, plot and checkpoints.
    preset: str = "tiny"  # model and its settings: tiny, tiny_llama3, llama3_8b ...; see `fsharding.models.presets`.
    ranks: int | None = None  # local ranks to start; default: this process alone, or torchrun's ranks.
    mesh: str = ""  # axis sizes, such as `replica=2,dp=2,tp=2`; dp takes the remaining ranks.
    sequence: bool = False  # sequence parallelism: shard activations over tp between attention and MLP.
    attention: Literal["ring", "gather", "ulysses"] = "ring"  # attention over cp: ring, gather, ulysses.
    schedule: str = "1f1b"  # pipeline schedule: gpipe, 1f1b, interleaved, interleaved_zero_bubble, zbv, dualpipev.
    stages_per_rank: int | None = None  # pipeline stages on each rank; default: the minimum of the schedule.
    stage_layers: str = ""  # layers of each stage, in order, such as `3,5`; default: as even as possible.
    gather: Literal["step", "microbatch"] = "step"  # all-gather a stage's parameters once per step, or per microbatch.
    strategy: str = "zero3"  # zero0 to zero3, no_shard, optim, optim_grads, optim_grads_params, hsdp, hfsdp.
    # tensors to move off the device: `activations`, `params`, `main`, `moments` or `grads` to `host` or `disk`, such as
    # `activations=host,moments=host,main.blocks=disk` (activations: host only). `compute=host` updates parameters on
    # the CPU, with moments and main parameters there. Disk is a file in `out`, or in FSHARDING_DISK if set.
    offload: str = ""
    dtype: str = "float32"  # float32, bfloat16, float16; or bfloat16 all-gathered as fp8, fp8-block, mxfp8, nvfp4.
    steps: int = 60  # total number of steps, those before a resume included.
    microbatches: int = 1  # gradient accumulation: microbatches of a rank's batch.
    batch: int = 8  # sequences in the global batch.
    seq: int = 128  # tokens in a sequence.
    seed: int = 0  # seed of parameters and data.
    # training data: `default` (source of the Python standard library), a file, a directory, or a `.bin` of tokens. With
    # `tokenizer` also a .json, .jsonl, .parquet or .csv file, a directory of these, or a data set saved by `datasets`.
    data: str = "default"
    tokenizer: Path | None = None  # tokenizer.json, or its directory; default: each byte is a token.
    text_column: str = "text"  # column with the text, if data has several.
    eos: str = ""  # end-of-document token, as text or id; default: the tokenizer's.
    documents: bool = False  # mask attention between documents (files, rows, or parts between separators).
    val_data: str = ""  # validation data, as `data`; default: no validation.
    val_every: int = 0  # steps between validations; 0: after the last step only.
    val_batches: int = 8  # batches of a validation, the same ones each time.
    save_every: int = 0  # steps between checkpoints; 0: at the end only.
    keep: int | None = None  # number of newest checkpoints to keep; default: all.
    check_replicas_every: int = 0  # steps between comparisons of replicated values; 0: at checkpoints only.
    swap_at: str = ""  # strategy, mesh or precision from a step on: `50=zero1,100=zero3:replica=2,dp=2,150=bf16`.
    # checkpoint to resume from: `auto` (newest complete one in `out`, else a new run), `newest` (an error if there is
    # none), the number of a step in `out`, or the path of a checkpoint.
    resume: str = ""
    resume_older: bool = False  # fall back to an older checkpoint if the newest is damaged.
    # activations that blocks save for backward: save_except_gathered, nothing_saveable, dots_saveable,
    # everything_saveable; or, in host memory: offload, offload_inputs.
    policy: str = "save_except_gathered"
    optimizer: str = "adamw"  # adamw, lion, adafactor, or muon (for matrices of blocks; AdamW for the rest).
    lr: float | None = None  # peak learning rate; default: the preset's (lion: x 0.2, adafactor: x 10).
    decay_steps: int = 0  # step at which a cosine decay to 10 % ends, warm-up included; 0: constant rate.
    clip: float = 1.0  # maximum global gradient norm.
    timeout: float = 120.0  # seconds that a collective waits for other ranks.
    # time by which to have saved and exited, as on SIGTERM: `3h50m` from now, `2030-01-31T18:00`, or `slurm` for the
    # end of the job. The run stops twice its longest step and save earlier.
    deadline: str = ""
    preempt_status: int = 0  # exit status after a signal or the deadline, once saved.
    grace: float = 600.0  # seconds for local ranks to save after a signal before they are killed.
    plot: bool = True  # draw `loss.png`, if matplotlib is installed.
    log_every: float = 10.0  # seconds between progress lines without a terminal; 0: every step.
    # trackers besides `metrics.jsonl`: tensorboard, wandb, json; separated by commas, or repeated. wandb is offline
    # unless WANDB_MODE is set.
    log: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    peak_tflops: float | None = None  # peak TFLOP/s of a device, for MFU; default: from a table of GPUs.
    trace: int | None = None  # step to record as a chrome trace of each rank in `out/trace`.
    json: bool = False  # print one JSON object at the end, progress on standard error.
    config: Path | None = None  # YAML or TOML file with any of these options; the command line overrides it.
    print_config: bool = False  # print all options as a file for `config`, and exit.

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.out / "ckpt"

    @property
    def metrics(self) -> Path:
        """File of metrics."""
        return self.out / "metrics.jsonl"

    @property
    def texts(self) -> dict[str, str]:
        """Values of all options as text, by field."""
        return {name: str(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class PlanConfig:
    """Show what a preset takes on a mesh of any size."""

    preset: tyro.conf.Positional[str]  # preset of `fsharding.models.presets`.
    mesh: str = "dp=1"  # axis sizes, such as `pp=16,dp=4,ep=64,tp=2`; the product is the number of ranks.
    strategy: str = "zero3"  # zero0 to zero3, no_shard, optim, optim_grads, optim_grads_params, hsdp, hfsdp.
    offload: str = ""  # tensors to move off the device, as in `fsharding train`.
    dtype: str = "bfloat16"  # float32, bfloat16, float16; or bfloat16 all-gathered as fp8, fp8-block, mxfp8, nvfp4.
    schedule: str = "1f1b"  # pipeline schedule over pp.
    microbatches: int | None = None  # microbatches of the schedule; default: twice the size of pp.
    json: bool = False  # print one JSON object.


@dataclass(frozen=True)
class DoctorConfig:
    """Look at this machine as ranks will see it."""

    json: bool = False  # print one JSON object.


@dataclass(frozen=True)
class InspectConfig:
    """Show a checkpoint and verify it."""

    path: tyro.conf.Positional[Path]  # checkpoint, or --out directory of a run.
    json: bool = False  # print one JSON object.


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a prompt with the model of a checkpoint."""

    # checkpoint, --out directory of a run (its newest checkpoint), or Hugging Face directory.
    path: tyro.conf.Positional[Path]
    prompt: str = "\n"  # text to continue.
    tokens: int = 100  # maximum number of new tokens.
    temperature: float = 0.8  # sampling temperature; 0: always the most likely token.
    top_k: int | None = None  # sample from the k most likely tokens.
    top_p: float | None = None  # sample from the most likely tokens with this total probability (nucleus).
    eos: int | None = None  # id of the token that ends the text.
    seed: int = 0  # seed of sampling; the text is the same on any number of ranks.
    ranks: int | None = None  # local ranks to start; default: this process alone, or the ranks of torchrun.
    mesh: str = ""  # axis sizes, such as `dp=2`; tp takes the remaining ranks.
    dtype: str = "float32"  # float32, bfloat16, float16; or bfloat16 all-gathered as fp8, fp8-block, mxfp8, nvfp4.
    preset: str = ""  # preset of the model, if the checkpoint does not record it.
    model: Path | None = None  # config.json of the model, if the checkpoint does not record it.
    tokenizer: Path | None = None  # tokenizer.json, or its directory; default: the run's.
    timeout: float = 120.0  # seconds that a collective waits for other ranks.
    json: bool = False  # print one JSON object at the end.


@dataclass(frozen=True)
class ReshardConfig:
    """Write a checkpoint in another layout."""

    source: tyro.conf.Positional[Path]  # checkpoint to read.
    target: tyro.conf.Positional[Path]  # directory to create.
    mesh: str  # axis sizes, such as `dp=2,tp=2`; the product is the number of ranks.
    strategy: str | None = None  # strategy, as in `fsharding train`; default: the saved one.
    json: bool = False  # print one JSON object.


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint for another program."""

    source: tyro.conf.Positional[Path]  # checkpoint to read.
    target: tyro.conf.Positional[Path]  # file (torch) or directory (safetensors, dcp) to create.
    format: Literal["torch", "safetensors", "dcp"]  # format of the files.
    # JSON file that maps paths of leaves to foreign names; `{i}` is the index of a block, and `{"transposed": NAME}`
    # swaps the last two dims.
    names: Path | None = None
    what: Literal["params", "all"] = "params"  # parameters only, or every leaf.
    max_file_bytes: int = 5 << 30  # maximum size of a file with several tensors, in bytes.
    json: bool = False  # print one JSON object.
