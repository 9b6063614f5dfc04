"""Shows how functional and raw collectives, and DTensors, behave under transforms of torch.func, on two ranks."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import fsharding as fs


def probe():
    x, found = torch.arange(2.0) + 10 * dist.get_rank(), {}

    def fill(x):
        rows = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(rows, x * 1.0)
        return torch.stack(rows)

    def in_place(x):
        y = x * 1.0
        dist.all_reduce(y)
        return y

    def total(x):
        return fc.all_reduce(x * 1.0, "sum", dist.group.WORLD).sum()

    def gathered(v):
        return fc.all_gather_tensor(v, 0, dist.group.WORLD)

    def sharded():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        d = torch.distributed.tensor.distribute_tensor(torch.ones(4), mesh, [torch.distributed.tensor.Shard(0)])
        return torch.func.grad(lambda d: found.update(seen=hasattr(d, "placements")) or d.sum())(d) is None

    @torch.compile(backend="eager")
    def compiled(x):
        stack = torch._C._functorch.peek_interpreter_stack() is not None
        return x * stack, x * (torch._C._functorch.maybe_current_level() is not None)

    for name, call in {
        "func.grad": lambda: torch.func.grad(total)(x),
        "func.jvp": lambda: torch.func.jvp(total, (x,), (torch.ones(2),))[1],
        "func.vmap": lambda: torch.func.vmap(gathered)(torch.stack([x, -x])),
        "raw gather": lambda: torch.func.grad(lambda x: fill(x).square().sum())(x),
        "raw reduce": lambda: torch.func.grad(lambda x: in_place(x).sum())(x),
        "DTensor": sharded,
        "compile: a stack, a level": lambda: compiled(torch.ones(())),
    }.items():
        try:
            found[name] = str(call())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:100]
    return found


if __name__ == "__main__":
    print(*fs.run_ranks(probe, 2)[0].items(), sep="\n")
