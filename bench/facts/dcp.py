"""Shows how torch.distributed.checkpoint treats damaged, mixed and unlike checkpoints."""

import os
import pickle
import random
import tempfile
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsharding as fs

warnings.simplefilter("ignore")


class Pair(NamedTuple):
    a: torch.Tensor


def uneven(path):
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()

    def claim(x):
        x = x[:9] if rank == 0 else x[9:]
        return DTensor.from_local(x.clone(), mesh, [Shard(0)], run_check=False, shape=torch.Size((16,)), stride=(1,))

    dcp.save({"x": claim(torch.arange(16.0))}, checkpoint_id=f"{path}/uneven")
    again = claim(torch.full((16,), -1.0))
    dcp.load({"x": again}, checkpoint_id=f"{path}/uneven")
    mine = {"x": torch.full((2,), float(rank))}
    dcp.save(mine, checkpoint_id=f"{path}/replicas")
    dcp.load(mine, checkpoint_id=f"{path}/replicas")
    return again.to_local().tolist(), mine["x"].tolist()


def flips(path):
    state = {"w": torch.randn(64, 64), "b": torch.randn(64)}
    dcp.save(state, checkpoint_id=path)
    file = next(f"{path}/{name}" for name in os.listdir(path) if name.endswith(".distcp"))
    with open(file, "rb") as f:
        raw = f.read()
    random.seed(0)
    counts = {"wrong": 0, "right": 0, "raised": 0}
    for _ in range(200):
        bad, place = bytearray(raw), random.randrange(len(raw))
        bad[place] ^= 1 << random.randrange(8)
        with open(file, "wb") as f:
            f.write(bad)
        found = {name: torch.zeros_like(x) for name, x in state.items()}
        try:
            dcp.load(found, checkpoint_id=path)
            counts["right" if all(torch.equal(found[k], x) for k, x in state.items()) else "wrong"] += 1
        except BaseException:
            counts["raised"] += 1
    return len(raw), counts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        print("9 + 7 rows, and replicas:", *fs.run_ranks(uneven, 2, path), sep="\n")
        print("bit flips:", *flips(f"{path}/flips"))
        dcp.save({"pair": Pair(torch.ones(2)), "list": [torch.ones(2)]}, checkpoint_id=f"{path}/pair")
        with open(f"{path}/pair/.metadata", "rb") as f:
            print({key: type(entry).__name__ for key, entry in pickle.load(f).state_dict_metadata.items()})
