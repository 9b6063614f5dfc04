"""What a step copies to the host and back, and which share of it is hidden, by what is kept there.

    python -m bench.copies [--preset bench-1b] [--ranks 8] [--seq-len 1024] [--host-gbs 55]

Steps of a rank run on fake tensors of the simulated device of the tests, whose attention has no fused kernel;
`timeline_of` places them in time at given rates. What the CPU computes takes no time here.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import fsharding as fs
from fsharding.comm.stream_log import recording_streams
from fsharding.models.decoder import decoder
from fsharding.models.presets import recipe
from fsharding.train.foresight import FakeRank, fake_step
from fsharding.train.timeline import Rates, timeline_of
from tests import sim_device

KEPT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "moments": {"moments": "host"},
    "main, moments": {"main": "host", "moments": "host"},
    "compute": {"compute": "host"},
    "compute, grads": {"compute": "host", "grads": "host"},
    "compute, grads, params": {"compute": "host", "grads": "host", "params": "host"},
    "params": {"params": "host"},
    "grads": {"grads": "host"},
    "all": {"params": "host", "moments": "host", "grads": "host"},
}


class Times(NamedTuple):
    """Seconds of a step, of what it computes, of its copies, and of those copies that are hidden."""

    step: float
    compute: float
    copies: float
    hidden: float


def times_of(
    model: Any, memory: dict[str, Any], rates: Rates, *, ranks: int, tokens: torch.Tensor, **options: Any
) -> Times:
    """Return the times of a step in a run with zero(3): what one more step takes, since copies run into the next."""
    mesh, precision = fs.AbstractMesh(("dp",), (ranks,)), replace(fs.BF16, sums="native")
    layout = fs.plan_layout(model, mesh, strategy=fs.zero(3).with_memory(**memory), precision=precision)
    batch, rank = {"tokens": tokens, "targets": tokens}, FakeRank(device_type=sim_device.NAME)
    options |= {"donate": True, "check": "async"}
    totals: list[Times] = []
    for steps in (2, 3):
        log = fake_step(recording_streams, model, fs.adamw(1e-3), layout, batch, rank=rank, steps=steps, **options)
        line = timeline_of([log.rows], rates)
        totals.append(Times(line.seconds, line.compute, line.copies, line.copies * line.copies_hidden))
    return Times(*(after - before for before, after in zip(*totals, strict=True)))


def main() -> None:
    """Print a row for each assignment, and for the policies that keep activations on the host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="bench-1b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--host-gbs", type=float, default=55.0)
    options = parser.parse_args()
    sim_device.build()
    sim_device.join()
    rates = Rates(flops=500e12, memory=2500e9, link=200e9, latency=20e-6, host=options.host_gbs * 1e9)
    model = decoder(recipe(options.preset).config)
    tokens = torch.empty(4, options.seq_len, dtype=torch.int64, device="meta")
    rows = [(name, memory, fs.policies.save_except_gathered) for name, memory in KEPT.items()]
    rows += [(policy.name, {}, policy) for policy in (fs.policies.offload_inputs, fs.policies.offload)]
    print("| on the host | step, ms | compute, ms | copies, ms | hidden |\n|---|---|---|---|---|")
    for name, memory, policy in rows:
        found = times_of(model, memory, rates, ranks=options.ranks, tokens=tokens, policy=policy)
        share = found.hidden / found.copies if found.copies else 1
        numbers = " | ".join(f"{seconds * 1e3:.1f}" for seconds in found[:3])
        print(f"| {name} | {numbers} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
