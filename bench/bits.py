"""Hash what small trainings compute and send, so that two commits can be compared bit by bit.

    python -m bench.bits > before.txt       # at one commit
    python -m bench.bits > after.txt        # at the other; then: diff before.txt after.txt

Seven meshes, four ZeRO levels, three precisions and one or two microbatches make 168 trainings; low-precision formats,
narrow moments, an embedding in bfloat16, a decay mask and a state on disk follow. Each line has a name, a hash of
losses, gradient norms and final parameters of all ranks, and a hash of the calls and bytes that each rank sent.
`--only TEXT` runs the trainings whose name contains the text.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from dataclasses import dataclass, replace

import torch

import fsharding as fs
from fsharding import formats
from fsharding.formats.precision import Precision
from fsharding.sharding.named_sharding import local_of
from fsharding.testing import device_mesh, run_ranks
from fsharding.transforms.unit_plan import large_from
from tests.decoders import DecoderCase

CONFIG = fs.models.DecoderConfig(vocab_size=34, dim=32, layers=2, heads=2, kv_heads=2, intermediate_size=48)
MESHES = {
    "dp1": {"dp": 1}, "dp2": {"dp": 2}, "dp3": {"dp": 3}, "replica2-dp2": {"replica": 2, "dp": 2},
    "dp2-tp2": {"dp": 2, "tp": 2}, "dp2-cp2": {"dp": 2, "cp": 2}, "pp2-dp2": {"pp": 2, "dp": 2},
}  # fmt: skip
PRECISIONS = {"fp32": fs.FP32, "bf16": fs.BF16, "fp16": fs.FP16}
EVERY_LEAF = replace(fs.NVFP4, keep=())
FORMATS = {
    "mxfp8": fs.MXFP8,
    "mxfp8-all": replace(fs.MXFP8, keep=()),
    "nvfp4": replace(fs.NVFP4, keep=("*embed*", "*head*", "*norm*", "*bias*")),
    "nvfp4-stochastic": replace(EVERY_LEAF, gather=formats.NVFP4.with_rounding("stochastic"), reduce=formats.NVFP4),
    "fp8-block": fs.FP8_BLOCK,
    "fp8-tensor": fs.FP8,
    "moments8": replace(fs.BF16, moments=formats.MXFP8),
    "bf16-main": Precision(params=torch.bfloat16, grads=torch.float32, moments=formats.MXFP8, rounding="stochastic"),
    "reduce-bf16": replace(fs.BF16, reduce=torch.bfloat16),
    "native-sums": replace(fs.FP32, sums="native"),
    "moments-bf16": replace(fs.FP32, moments=torch.bfloat16),
    "embed-bf16": Precision(compute=torch.bfloat16, grads=torch.float32),
    "decay-mask": fs.FP32,
    "disk": fs.BF16,
}
VOCAB = {"embed-bf16": 2}
"""A vocabulary of two: many rows are added for each token."""
MEMORY = {"disk": dict.fromkeys(("params", "main", "moments", "grads"), "disk")}


@dataclass(frozen=True)
class Training:
    """One training; `alone` sends large leaves one by one, as large models do."""

    mesh: str
    level: int
    precision: str
    microbatches: int
    alone: bool = False

    def __str__(self) -> str:
        return f"{self.mesh}/zero{self.level}/{self.precision}/{self.microbatches}{'/alone' if self.alone else ''}"


def trainings() -> list[Training]:
    """All trainings, grouped by mesh so that ranks are started once."""
    result: list[Training] = []
    for mesh in MESHES:
        result += [Training(mesh, *rest) for rest in itertools.product(range(4), PRECISIONS, (1, 2))]
        if mesh in ("dp2", "replica2-dp2", "dp2-tp2", "pp2-dp2"):
            result += [Training(mesh, *rest) for rest in itertools.product((0, 1, 3), FORMATS, (2,))]
            result += [
                Training(mesh, *rest, alone=True) for rest in itertools.product((0, 1, 3), ("bf16", "mxfp8"), (2,))
            ]
    return result


def case_of(training: Training) -> DecoderCase:
    """The training as a case of a decoder."""
    axes = MESHES[training.mesh]
    mesh = fs.AbstractMesh(tuple(axes), tuple(axes.values()))
    precision = {**PRECISIONS, **FORMATS}[training.precision]
    config = replace(CONFIG, vocab_size=VOCAB.get(training.precision, CONFIG.vocab_size))
    strategy = fs.zero(training.level).with_memory(**MEMORY.get(training.precision, {}))
    return DecoderCase(
        config, mesh, strategy, rows=24, length=8, steps=3, microbatches=training.microbatches,
        precision=precision, sequence="tp" in axes,
    )  # fmt: skip


def hashes(training: Training) -> tuple[str, str]:
    """Hashes of the numbers and of the bytes sent of this rank."""
    if not training.alone:
        return _hashes(training)
    with large_from(1):
        return _hashes(training)


def _hashes(training: Training) -> tuple[str, str]:
    case, numbers, sent = case_of(training), hashlib.sha256(), hashlib.sha256()
    mesh, model = device_mesh(case.mesh), case.model
    adamw = fs.adamw(1e-2, weight_decay=0.1)
    if training.precision == "decay-mask":
        groups = {"decay": adamw, "no_decay": fs.adamw(1e-2)}
        adamw = fs.optim.multi_transform(groups, lambda path, leaf: "decay" if leaf.ndim >= 2 else "no_decay")
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.5), adamw)
    state = fs.init_state(model, opt, fs.random.key(0), case.layout(mesh))
    step = fs.make_train_step(
        model, opt, microbatches=training.microbatches, schedule=case.planned() or case.schedule, donate=True
    )
    for number in range(case.steps):
        with fs.debug.count_bytes() as traffic:
            state, metrics = step(state, case.batch(number, mesh))
        numbers.update(repr((metrics.loss.item(), metrics.grad_norm.item())).encode())
        sent.update(repr(sorted(traffic.by_axes.items())).encode())
    for path, leaf in fs.tree.named_leaves((state.params, state.main, state.opt_state)).items():
        numbers.update(repr(path).encode())
        if isinstance(leaf, torch.Tensor):
            local = local_of(leaf) if hasattr(leaf, "device_mesh") else leaf
            numbers.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return numbers.hexdigest(), sent.hexdigest()


def main() -> None:
    """Print one line for each training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the trainings whose name contains this text")
    only = parser.parse_args().only
    for training in trainings():
        if only in str(training):
            try:
                results = run_ranks(hashes, case_of(training).ranks, training, timeout=300)
            except fs.errors.FshardingError as error:
                print(f"{training} {type(error).__name__}: {str(error).splitlines()[-1]}", flush=True)
                continue
            numbers, sent = (
                hashlib.sha256("".join(part).encode()).hexdigest()[:16] for part in zip(*results, strict=True)
            )
            print(training, numbers, sent, flush=True)


if __name__ == "__main__":
    main()
