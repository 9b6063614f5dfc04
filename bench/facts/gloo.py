"""Times collectives of gloo beside sends and receives, on two and four ranks."""

import statistics
import time
import warnings

import torch
import torch.distributed as dist

import fsharding as fs
from fsharding.comm.native import Native
from fsharding.comm.reduce import sum_rows
from fsharding.contrib.pairwise import Pairwise
from fsharding.mesh.device_mesh import axis_group


def table(megabytes):
    warnings.simplefilter("ignore")
    d = dist.get_world_size()
    n = int(megabytes * 2**18) // d * d
    group = axis_group(fs.make_mesh(dp=-1), ("dp",))
    rows = torch.ones(d, n // d)
    mine, whole, part = torch.ones(n // d), torch.ones(n), torch.empty(n // d)
    native, pairwise = (kind(group, torch.device("cpu")) for kind in (Native, Pairwise))
    exchange, own = native.all_to_all(n // d, torch.float32), pairwise.gather_rows(n // d, torch.float32)
    exchange.own.fill_(1)
    own.own.fill_(1)

    def scatter():
        sum_rows(exchange.start().wait(), group.terms, torch.float32)

    calls = {
        "all_gather": lambda: dist.all_gather_into_tensor(rows.view(-1), mine),
        "gather, pairwise": lambda: own.start().wait(),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all and sum": scatter,
        "all_reduce": lambda: dist.all_reduce(whole),
    }
    times = {name: [] for name in calls}
    for _ in range(15):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


if __name__ == "__main__":
    for ranks, megabytes in ((2, 1 / 16), (2, 2), (2, 16), (4, 1 / 16), (4, 16)):
        print(ranks, "ranks,", megabytes, "MB:", fs.run_ranks(table, ranks, megabytes)[0])
