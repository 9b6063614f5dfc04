"""What a step copies to the host and back, and which share of it is hidden, by what is kept there.

    python -m bench.copies [--preset bench-1b] [--ranks 8] [--host-gbs 55]

One step of a rank runs on fake tensors of the simulated device of the tests, whose attention has no fused kernel;
`timeline_of` places it in time at given rates. What the CPU computes takes no time here.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

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
    "compute": {"compute": "host"},
    "compute, grads": {"compute": "host", "grads": "host"},
    "compute, grads, params": {"compute": "host", "grads": "host", "params": "host"},
    "params": {"params": "host"},
    "grads": {"grads": "host"},
    "all": {"params": "host", "moments": "host", "grads": "host"},
}


def main() -> None:
    """Print a row for each assignment, and for the policies that keep activations on the host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="bench-1b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--host-gbs", type=float, default=55.0)
    options = parser.parse_args()
    sim_device.build()
    sim_device.join()
    rates = Rates(flops=500e12, memory=2500e9, link=200e9, latency=20e-6, host=options.host_gbs * 1e9)
    model, mesh = decoder(recipe(options.preset).config), fs.AbstractMesh(("dp",), (options.ranks,))
    tokens = torch.empty(4, 1024, dtype=torch.int64, device="meta")
    rows = [(name, memory, fs.policies.save_except_gathered) for name, memory in KEPT.items()]
    rows += [(policy.name, {}, policy) for policy in (fs.policies.offload_inputs, fs.policies.offload)]
    print("| on the host | step, ms | compute, ms | copies, ms | hidden |\n|---|---|---|---|---|")
    for name, memory, policy in rows:
        precision = replace(fs.BF16, sums="native")
        layout = fs.plan_layout(model, mesh, strategy=fs.zero(3).with_memory(**memory), precision=precision)
        log = fake_step(
            recording_streams, model, fs.adamw(1e-3), layout, {"tokens": tokens, "targets": tokens},
            rank=FakeRank(device_type=sim_device.NAME), donate=True, check="async", policy=policy,
        )  # fmt: skip
        line = timeline_of([log.rows], rates)
        numbers = f"{line.seconds * 1e3:.1f} | {line.compute * 1e3:.1f} | {line.copies * 1e3:.1f}"
        print(f"| {name} | {numbers} | {line.copies_hidden:.0%} |", flush=True)


if __name__ == "__main__":
    main()
