"""Shows a functional all-gather under torch.func.vmap, and what compiled code sees of transforms, on two ranks."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import fsharding as fs


def probe():
    x, found = torch.arange(2.0) + 10 * dist.get_rank(), {}

    def gathered(v):
        return fc.all_gather_tensor(v, 0, dist.group.WORLD)

    @torch.compile(backend="eager")
    def compiled(x):
        stack = torch._C._functorch.peek_interpreter_stack() is not None
        return x * stack, x * (torch._C._functorch.maybe_current_level() is not None)

    for name, call in {
        "func.vmap": lambda: torch.func.vmap(gathered)(torch.stack([x, -x])),
        "compile: a stack, a level": lambda: compiled(torch.ones(())),
    }.items():
        try:
            found[name] = str(call())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:100]
    return found


if __name__ == "__main__":
    print(*fs.run_ranks(probe, 2)[0].items(), sep="\n")
