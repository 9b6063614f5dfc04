"""A reshard of your own, tested between any two layouts: random meshes, strategies, trees, axis orders, stages.

Run it with `pytest examples/test_my_reshard.py`, or as a script. The cases are drawn here and sent to ranks that wait.
"""

import itertools

import torch
import torch.distributed as dist
from hypothesis import given, settings

import fsharding as fs
from fsharding.sharding.boxes import grid_boxes
from fsharding.testing import assert_bitwise_equal, device_mesh, local_part, run_ranks, whole_tensors
from fsharding.testing.strategies import reshard_cases


def my_reshard(local, shape, source, target):
    """The code under test: everybody tells everybody what he has, and keeps what he needs."""
    grid = source.grid(shape)
    mine = [] if grid is None else [(box, local[place]) for box, place in grid_boxes(grid)]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = torch.empty(shape, dtype=local.dtype)
    for box, part in itertools.chain(*everyone):
        whole[tuple(slice(start, stop) for start, stop in box)] = part
    return local_part(whole, target)


def on_each_rank(case):
    """Every rank knows what it should end with: it cuts its part out of the whole tensors itself."""
    source, target = (home.layout(case.leaves, device_mesh(home.mesh)) for home in (case.source, case.target))
    wholes = whole_tensors(case.leaves)

    def there_and_back(whole, a, b):
        shape, held = whole.shape, local_part(whole, a)
        there = my_reshard(held, shape, a, b)
        assert_bitwise_equal(there, local_part(whole, b), "what arrived")
        assert_bitwise_equal(my_reshard(there, shape, b, a), held, "what came back")

    fs.tree.map(there_and_back, wholes, source.params, target.params)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(reshard_cases(max_ranks=4))
def test_my_reshard(case):
    run_ranks(on_each_rank, case.ranks, case, timeout=20.0)


if __name__ == "__main__":
    test_my_reshard()
    print("25 random cases went there and back, equal in every bit")
