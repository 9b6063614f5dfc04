"""The options of each verb, apart from what acts on them: they are read before torch is imported.

In: nothing but the standard library and tyro. Out: dataclasses, whose docstrings are the help of `fsharding`.
Guarantee: no torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

__all__ = [
    "DoctorConfig",
    "ExportConfig",
    "GenerateConfig",
    "InspectConfig",
    "PlanConfig",
    "ReshardConfig",
    "TrainConfig",
]


@dataclass(frozen=True)
class TrainConfig:
    """The model to train, its ranks and mesh, and the length of the run.

    Attributes:
        out: directory of metrics, plot and checkpoints.
        preset: model and settings: a name of `fsharding.models.presets`, such as tiny, tiny_llama3, llama3_8b.
        ranks: local ranks to start; left out, this process alone, or the ranks that torchrun started.
        mesh: sizes of axes, such as `replica=2,dp=2,tp=2`; dp takes what is left.
        sequence: cut activations along the sequence over tp between attention and MLP.
        schedule: of the pipeline over pp: gpipe, 1f1b, interleaved, interleaved_zero_bubble, zbv, dualpipev.
        stages_per_rank: of the pipeline; left out, the least that the schedule can have.
        stage_layers: layers of each stage, in order, such as `3,5`; left out, as even as possible.
        gather: a stage's parameters that data axes cut come once a step and stay, or anew for each microbatch.
        attention: how queries meet keys over cp: ring, gather, ulysses.
        strategy: zero0 to zero3, no_shard, optim, optim_grads, optim_grads_params, hsdp, hfsdp.
        offload: what is kept elsewhere than on the device: of `activations`, `params`, `main`, `moments` and `grads`
            on `host` or `disk`, such as `activations=host,moments=host,main.blocks=disk`. Activations are on the host
            at most. With `compute=host` the CPU updates parameters, with moments and main parameters there. The file
            is in `out`, unless FSHARDING_DISK says where.
        dtype: of compute: float32, bfloat16 or float16; or in bfloat16 with weights that travel as fp8, fp8-block,
            mxfp8 or nvfp4.
        steps: total number of steps, also with `resume`.
        microbatches: pieces of a rank's batch whose gradients are accumulated.
        batch: sequences of the global batch.
        seq: tokens of a sequence.
        seed: of parameters and data.
        data: `default` (the Python standard library's own source), a file, a directory, or a `.bin` of tokens. With
            `tokenizer` also a .json, .jsonl, .parquet or .csv file, a directory of those, or one that `datasets` saved.
        tokenizer: a tokenizer.json, or a directory that has one; left out, text is taken byte by byte.
        text_column: of data with several columns.
        eos: the token that ends a document, by its text or its id; left out, the tokenizer's own.
        documents: tokens see their own document only: a file, a row of a data set, or what the separator of a
            `.bin` ends.
        val_data: data of the same kinds, of which the loss is taken forward only; left out, there is no validation.
        val_every: steps between validations; 0 for one after the last step only.
        val_batches: how many batches a validation sees, each time the same ones.
        save_every: steps between checkpoints; 0 for one at the end only.
        keep: how many checkpoints stay, the newest; left out, all.
        check_replicas_every: steps between comparisons of what several ranks hold; 0 for checkpoints alone.
        swap_at: steps at which the state moves to another strategy, mesh or precision:
            `50=zero1,100=zero3:replica=2,dp=2,150=bf16`.
        resume: what to go on from: `auto`, the newest complete checkpoint in `out`, or a new run where there is none;
            `newest`, which has to be there; the number of a step in `out`; or the path of a checkpoint.
        resume_older: go back to the checkpoint before, if the data of the one to go on from turns out to be damaged.
        policy: what blocks keep for backward: save_except_gathered, nothing_saveable, dots_saveable,
            everything_saveable; or on the host: offload, offload_inputs.
        optimizer: adamw, lion, muon (for the matrices of blocks, AdamW for the rest) or adafactor.
        lr: peak learning rate; left out, the preset's, which is one of AdamW, times 0.2 for lion and 10 for adafactor.
        decay_steps: step at which a cosine decay to a tenth ends, not before the warm-up does; 0 for a constant rate
            after it.
        clip: largest global gradient norm.
        timeout: seconds that a collective waits for its peers.
        deadline: when to have saved and ended, as after SIGTERM: after `3h50m`, at `2030-01-31T18:00`, or `slurm` for
            the end of its job. The run stops before it by twice its longest step and save.
        preempt_status: exit status of a run that SIGTERM, SIGUSR1 or the deadline has stopped, and that has saved.
        grace: seconds that the ranks of `ranks` have to save after a signal, before they are killed.
        plot: draw `loss.png`, if matplotlib is installed.
        log_every: seconds between lines of progress where there is no terminal; 0 for a line after every step.
        log: where metrics go besides `metrics.jsonl`: tensorboard, wandb, json; several with commas, or several times.
            wandb is offline unless WANDB_MODE says otherwise.
        peak_tflops: peak TFLOP/s of a rank's device in `dtype`, for the utilization; left out, the peak of a known GPU.
        trace: number of a step whose chrome trace each rank writes below `out/trace`.
        json: print one JSON object at the end, and progress on standard error.
        config: a file of YAML or TOML with any of these options; those on the command line win.
        print_config: print all options as a file that `config` takes, and exit.
    """

    out: Path
    preset: str = "tiny"
    ranks: int | None = None
    mesh: str = ""
    sequence: bool = False
    attention: Literal["ring", "gather", "ulysses"] = "ring"
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    stage_layers: str = ""
    gather: Literal["step", "microbatch"] = "step"
    strategy: str = "zero3"
    offload: str = ""
    dtype: str = "float32"
    steps: int = 60
    microbatches: int = 1
    batch: int = 8
    seq: int = 128
    seed: int = 0
    data: str = "default"
    tokenizer: Path | None = None
    text_column: str = "text"
    eos: str = ""
    documents: bool = False
    val_data: str = ""
    val_every: int = 0
    val_batches: int = 8
    save_every: int = 0
    keep: int | None = None
    check_replicas_every: int = 0
    swap_at: str = ""
    resume: str = ""
    resume_older: bool = False
    policy: str = "save_except_gathered"
    optimizer: str = "adamw"
    lr: float | None = None
    decay_steps: int = 0
    clip: float = 1.0
    timeout: float = 120.0
    deadline: str = ""
    preempt_status: int = 0
    grace: float = 600.0
    plot: bool = True
    log_every: float = 10.0
    log: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    peak_tflops: float | None = None
    trace: int | None = None
    json: bool = False
    config: Path | None = None
    print_config: bool = False

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
    """Show what a preset takes on a mesh of any size, without devices and memory.

    Attributes:
        preset: a name of `fsharding.models.presets`.
        mesh: sizes of axes, such as `pp=16,dp=4,ep=64,tp=2`; their product is the number of ranks.
        strategy: zero0 to zero3, no_shard, optim, optim_grads, optim_grads_params, hsdp, hfsdp.
        offload: what is kept elsewhere than on the device, as `fsharding train` takes it.
        dtype: of compute: float32, bfloat16 or float16; or in bfloat16 with weights that travel as fp8, fp8-block,
            mxfp8 or nvfp4.
        schedule: of the pipeline over pp.
        microbatches: of the schedule; left out, twice as many as ranks along pp.
        json: print one JSON object.
    """

    preset: tyro.conf.Positional[str]
    mesh: str = "dp=1"
    strategy: str = "zero3"
    offload: str = ""
    dtype: str = "bfloat16"
    schedule: str = "1f1b"
    microbatches: int | None = None
    json: bool = False


@dataclass(frozen=True)
class DoctorConfig:
    """Look at this machine as ranks will see it: versions, devices, transport, limits, and what listens where.

    Attributes:
        json: print one JSON object.
    """

    json: bool = False


@dataclass(frozen=True)
class InspectConfig:
    """Show what a checkpoint holds, and verify its checksums; or list the checkpoints of a run.

    Attributes:
        path: the checkpoint, or the --out directory of a run.
        json: print one JSON object.
    """

    path: tyro.conf.Positional[Path]
    json: bool = False


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a prompt with the model of a checkpoint.

    Attributes:
        path: the checkpoint, the --out directory of a run, whose newest one is taken, or a directory of Hugging Face.
        prompt: text to continue.
        tokens: how many new tokens at most.
        temperature: of the distribution that is drawn from; 0 takes the likeliest token each time.
        top_k: draw from so many likeliest tokens only.
        top_p: draw from the likeliest tokens only that have this probability together.
        eos: id of a token that ends the text.
        seed: of the draws; the text follows from it, on any number of ranks.
        ranks: local ranks to start; left out, this process alone, or the ranks that torchrun started.
        mesh: sizes of axes, such as `dp=2`; tp takes what is left.
        dtype: of compute: float32, bfloat16 or float16; or in bfloat16 with weights that travel as fp8, fp8-block,
            mxfp8 or nvfp4.
        preset: the model, where the checkpoint does not say it: a name of `fsharding.models.presets`.
        model: the model, where the checkpoint does not say it: a `config.json`.
        tokenizer: a tokenizer.json, or a directory that has one; left out, the run's, which may be bytes.
        timeout: seconds that a collective waits for its peers.
        json: print one JSON object at the end.
    """

    path: tyro.conf.Positional[Path]
    prompt: str = "\n"
    tokens: int = 100
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    eos: int | None = None
    seed: int = 0
    ranks: int | None = None
    mesh: str = ""
    dtype: str = "float32"
    preset: str = ""
    model: Path | None = None
    tokenizer: Path | None = None
    timeout: float = 120.0
    json: bool = False


@dataclass(frozen=True)
class ReshardConfig:
    """Write a checkpoint in another layout, in bounded memory.

    Attributes:
        source: the checkpoint.
        target: the directory to be.
        mesh: sizes of axes, such as `dp=2,tp=2`; their product is the number of ranks.
        strategy: zero0 to zero3, no_shard, optim, optim_grads, optim_grads_params, hsdp, hfsdp; by default the saved.
        json: print one JSON object.
    """

    source: tyro.conf.Positional[Path]
    target: tyro.conf.Positional[Path]
    mesh: str
    strategy: str | None = None
    json: bool = False


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint for another program.

    Attributes:
        source: the checkpoint.
        target: the file (torch) or directory (safetensors, dcp) to be.
        format: of what is written.
        names: a JSON file with a table from our paths to foreign names; `{i}` in a name is the index of a block, and
            `{"transposed": NAME}` swaps the last two dims.
        what: the parameters, or every leaf.
        max_file_bytes: files of more than one tensor are at most this large.
        json: print one JSON object.
    """

    source: tyro.conf.Positional[Path]
    target: tyro.conf.Positional[Path]
    format: Literal["torch", "safetensors", "dcp"]
    names: Path | None = None
    what: Literal["params", "all"] = "params"
    max_file_bytes: int = 5 << 30
    json: bool = False
