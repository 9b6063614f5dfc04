"""Law: `load(save(x, A), B) == reshard(x, B)`: a checkpoint of any layout loads into any other, bit for bit."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsharding.testing import Pair, run_ranks, strategies
from tests.checkpoints_on_ranks import LAYOUTS, compare, load_into, save_some, whole
from tests.helpers import examples, full
from tests.laws import load, save


@pytest.mark.parametrize(
    ("ranks", "source", "turn"),
    [
        pytest.param(2, "zero0", 0, marks=full),
        (2, "zero1_bf16", 1),
        pytest.param(4, "zero2", 1, marks=full),
        pytest.param(4, "zero3", 0, marks=full),
        (4, "tp", 0),
        (4, "pp_fp16", 1),
        pytest.param(4, "hsdp", 0, marks=full),
        (4, "hfsdp_bf16", 1),
    ],
)
def test_any_layout_to_any_other(tmp_path, ranks, source, turn):
    saved = whole(run_ranks(save_some, ranks, source, tmp_path / "a"))
    assert math.isclose(saved["main.table"].std().item(), 100.0, rel_tol=0.3)
    by_ranks = {
        2: ["zero0", "zero3", "pp_fp16", "tp", "zero1_bf16", "zero2"],
        4: [*LAYOUTS],
        3: ["zero3", "zero1_bf16"],
    }
    for n, names in ((n, names[turn::2]) for n, names in by_ranks.items()):
        done = run_ranks(load_into, n, names, tmp_path / "a", given=n == 4)
        for name in names:
            loaded = whole([held[name][0] for held in done])
            compare(saved, loaded, name, n, source)
            scale = ([256.0, 31] if source == "pp_fp16" else [2.0**16, 0]) if name == "pp_fp16" else None
            assert all(held[name][1] == scale for held in done)
    alone = load_into(["zero0", "zero1_bf16"], tmp_path / "a", given=False)
    for name, (held, _) in alone.items():
        compare(saved, whole([held]), name, 1, source)


def nodes_of(tree):
    """Every node of a tree of dicts, lists and pairs."""
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | Pair) else ()
    return [tree, *(node for child in children for node in nodes_of(child))]


@examples(20, 60)
@given(strategies.reshard_cases(subsets=False), st.booleans())
def test_a_checkpoint_loads_into_any_layout(case, given_opt):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        run_ranks(save, case.source.mesh.size, case.leaves, case.source, path)
        # A manifest names no class of a user: only the optimizer can rebuild moments that have one as a node.
        pairs = any(isinstance(node, Pair) for node in nodes_of(case.leaves))
        run_ranks(load, case.target.mesh.size, case.leaves, case.target, path, given_opt or pairs)
