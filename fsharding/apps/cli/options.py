"""The options of each verb, with their help as comments; read before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

__all__ = [
    "DoctorConfig", "ExportConfig", "GenerateConfig", "InspectConfig", "PlanConfig", "ReshardConfig",
    "TrainConfig",
]  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """The model to train, its ranks and mesh, and the length of the run."""

    out: Path  # directory of metrics, plot and checkpoints.
    preset: str = "tiny"  # model and settings, such as tiny, tiny_llama3, llama3_8b: see `fsharding.models.presets`.
    ranks: int | None = None  # local ranks to start; left out, this process alone, or the ranks that torchrun started.
    mesh: str = ""  # sizes of axes, such as `replica=2,dp=2,tp=2`; dp takes what is left.
    sequence: bool = False  # shard activations along the sequence over tp between attention and MLP.
    attention: Literal["ring", "gather", "ulysses"] = "ring"  # how queries meet keys over cp: ring, gather, ulysses.
    schedule: str = "1f1b"  # of the pipeline: gpipe, 1f1b, interleaved, interleaved_zero_bubble, zbv, dualpipev.
    stages_per_rank: int | None = None  # of the pipeline; left out, the least that the schedule can have.
    stage_layers: str = ""  # layers of each stage, in order, such as `3,5`; left out, as even as possible.
    gather: Literal["step", "microbatch"] = "step"  # gather a stage's parameters once a step, or a microbatch.
    strategy: str = "zero3"  # zero0 to zero3, no_shard, optim, optim_grads, optim_grads_params, hsdp, hfsdp.
    # what is kept elsewhere than on the device: of `activations`, `params`, `main`, `moments` and `grads` on `host`
    # or `disk`, such as `activations=host,moments=host,main.blocks=disk`. Activations are on the host at most. With
    # `compute=host` the CPU updates parameters, with moments and main parameters there. The file is in `out`, unless
    # FSHARDING_DISK says where.
    offload: str = ""
    dtype: str = "float32"  # float32, bfloat16, float16; or bfloat16 with gathers in fp8, fp8-block, mxfp8, nvfp4.
    steps: int = 60  # total number of steps, also with `resume`.
    microbatches: int = 1  # pieces of a rank's batch whose gradients are accumulated.
    batch: int = 8  # sequences of the global batch.
    seq: int = 128  # tokens of a sequence.
    seed: int = 0  # of parameters and data.
    # `default` (the Python standard library's own source), a file, a directory, or a `.bin` of tokens. With `tokenizer`
    # also a .json, .jsonl, .parquet or .csv file, a directory of those, or one that `datasets` saved.
    data: str = "default"
    tokenizer: Path | None = None  # a tokenizer.json, or a directory that has one; left out, text is bytes.
    text_column: str = "text"  # of data with several columns.
    eos: str = ""  # the token that ends a document, by its text or its id; left out, the tokenizer's own.
    documents: bool = False  # tokens see their own document only: a file, a row, or a part between separators.
    val_data: str = ""  # data of the same kinds for validation; left out, there is none.
    val_every: int = 0  # steps between validations; 0 for one after the last step only.
    val_batches: int = 8  # how many batches a validation sees, each time the same ones.
    save_every: int = 0  # steps between checkpoints; 0 for one at the end only.
    keep: int | None = None  # how many checkpoints stay, the newest; left out, all.
    check_replicas_every: int = 0  # steps between comparisons of what several ranks hold; 0 for checkpoints alone.
    swap_at: str = ""  # changes of strategy, mesh or precision at steps: `50=zero1,100=zero3:replica=2,dp=2,150=bf16`.
    # what to go on from: `auto`, the newest complete checkpoint in `out`, or a new run where there is none; `newest`,
    # which has to be there; the number of a step in `out`; or the path of a checkpoint.
    resume: str = ""
    resume_older: bool = False  # fall back to the checkpoint before if the data of the newest is damaged.
    # what blocks keep for backward: save_except_gathered, nothing_saveable, dots_saveable, everything_saveable; or on
    # the host: offload, offload_inputs.
    policy: str = "save_except_gathered"
    optimizer: str = "adamw"  # adamw, lion, muon (for the matrices of blocks, AdamW for the rest) or adafactor.
    lr: float | None = None  # peak learning rate; left out, the preset's for AdamW, x 0.2 for lion, x 10 for adafactor.
    decay_steps: int = 0  # step at which a cosine decay to a tenth ends, after the warm-up; 0 for a constant rate.
    clip: float = 1.0  # largest global gradient norm.
    timeout: float = 120.0  # seconds that a collective waits for its peers.
    # when to have saved and ended, as after SIGTERM: after `3h50m`, at `2030-01-31T18:00`, or `slurm` for the end of
    # its job. The run stops before it by twice its longest step and save.
    deadline: str = ""
    preempt_status: int = 0  # exit status of a run that a signal or the deadline has stopped, and that has saved.
    grace: float = 600.0  # seconds that the ranks of `ranks` have to save after a signal, before they are killed.
    plot: bool = True  # draw `loss.png`, if matplotlib is installed.
    log_every: float = 10.0  # seconds between lines of progress without a terminal; 0 for one after every step.
    # where metrics go besides `metrics.jsonl`: tensorboard, wandb, json; several with commas, or several times. wandb
    # is offline unless WANDB_MODE says otherwise.
    log: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    peak_tflops: float | None = None  # peak TFLOP/s of a device, for the utilization; left out, that of a known GPU.
    trace: int | None = None  # number of a step whose chrome trace each rank writes below `out/trace`.
    json: bool = False  # print one JSON object at the end, and progress on standard error.
    config: Path | None = None  # a file of YAML or TOML with any of these options; those on the command line win.
    print_config: bool = False  # print all options as a file that `config` takes, and exit.

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.out / "ckpt"

    @property
    def metrics(self) -> Path:
        """The metrics file."""
        return self.out / "metrics.jsonl"


@dataclass(frozen=True)
class PlanConfig:
    """Show what a preset takes on a mesh of any size, without devices and memory."""

    preset: tyro.conf.Positional[str]  # a name of `fsharding.models.presets`.
    mesh: str = "dp=1"  # sizes of axes, such as `pp=16,dp=4,ep=64,tp=2`; their product is the number of ranks.
    strategy: str = "zero3"  # zero0 to zero3, no_shard, optim, optim_grads, optim_grads_params, hsdp, hfsdp.
    offload: str = ""  # what is kept elsewhere than on the device, as `fsharding train` takes it.
    dtype: str = "bfloat16"  # float32, bfloat16, float16; or bfloat16 with gathers in fp8, fp8-block, mxfp8, nvfp4.
    schedule: str = "1f1b"  # of the pipeline over pp.
    microbatches: int | None = None  # of the schedule; left out, twice as many as ranks along pp.
    json: bool = False  # print one JSON object.


@dataclass(frozen=True)
class DoctorConfig:
    """Look at this machine as ranks will see it: versions, devices, transport, limits, and what listens where."""

    json: bool = False  # print one JSON object.


@dataclass(frozen=True)
class InspectConfig:
    """Show what a checkpoint holds, and verify its checksums; or list the checkpoints of a run."""

    path: tyro.conf.Positional[Path]  # the checkpoint, or the --out directory of a run.
    json: bool = False  # print one JSON object.


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a prompt with the model of a checkpoint."""

    # the checkpoint, the --out directory of a run, whose newest one is taken, or a directory of Hugging Face.
    path: tyro.conf.Positional[Path]
    prompt: str = "\n"  # text to continue.
    tokens: int = 100  # how many new tokens at most.
    temperature: float = 0.8  # of the distribution that is drawn from; 0 takes the likeliest token each time.
    top_k: int | None = None  # draw from so many likeliest tokens only.
    top_p: float | None = None  # draw from the likeliest tokens only that have this probability together.
    eos: int | None = None  # id of a token that ends the text.
    seed: int = 0  # of the draws; the text follows from it, on any number of ranks.
    ranks: int | None = None  # local ranks to start; left out, this process alone, or the ranks that torchrun started.
    mesh: str = ""  # sizes of axes, such as `dp=2`; tp takes what is left.
    dtype: str = "float32"  # float32, bfloat16, float16; or bfloat16 with gathers in fp8, fp8-block, mxfp8, nvfp4.
    preset: str = ""  # the model, where the checkpoint does not say it: a name of `fsharding.models.presets`.
    model: Path | None = None  # the model, where the checkpoint does not say it: a `config.json`.
    tokenizer: Path | None = None  # a tokenizer.json, or a directory that has one; left out, the run's own.
    timeout: float = 120.0  # seconds that a collective waits for its peers.
    json: bool = False  # print one JSON object at the end.


@dataclass(frozen=True)
class ReshardConfig:
    """Write a checkpoint in another layout, in bounded memory."""

    source: tyro.conf.Positional[Path]  # the checkpoint.
    target: tyro.conf.Positional[Path]  # the directory to be.
    mesh: str  # sizes of axes, such as `dp=2,tp=2`; their product is the number of ranks.
    strategy: str | None = None  # one of those that `fsharding train` takes; left out, the saved one.
    json: bool = False  # print one JSON object.


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint for another program."""

    source: tyro.conf.Positional[Path]  # the checkpoint.
    target: tyro.conf.Positional[Path]  # the file (torch) or directory (safetensors, dcp) to be.
    format: Literal["torch", "safetensors", "dcp"]  # of what is written.
    # a JSON file with a table from our paths to foreign names; `{i}` in a name is the index of a block, and
    # `{"transposed": NAME}` swaps the last two dims.
    names: Path | None = None
    what: Literal["params", "all"] = "params"  # the parameters, or every leaf.
    max_file_bytes: int = 5 << 30  # files of more than one tensor are at most this large.
    json: bool = False  # print one JSON object.
