"""Parts of leaves that travel as codes: they tile the leaf, and none is larger than a bucket."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding import formats
from fsharding.comm.redistribute import BUCKET_BYTES
from fsharding.comm.rounded_moves import batches_of, plan_parts, travels_as_codes
from fsharding.comm.steps import Step, plan_steps
from fsharding.comm.wires import Plain, Quantizing

MESH = fs.AbstractMesh(("dp", "tp"), (3, 2))
CUT, WHOLE = fs.NamedSharding(MESH, fs.P(None, "tp", "dp")), fs.NamedSharding(MESH, fs.P(None, "tp"))


@given(
    st.integers(0, 9),
    st.sets(st.integers(0, 8)),
    st.sampled_from([(40, 72), (8192, 4096), (8192, 8192)]),
    st.sampled_from([formats.MXFP8, formats.NVFP4, formats.ROWWISE]),
    st.booleans(),
)
def test_parts_are_all_rows_in_order_and_no_more_than_a_bucket(layers, kept, matrix, format, stays):
    kept, target = tuple(sorted(i for i in kept if i < layers)), CUT if stays else WHOLE
    parts = plan_parts(CUT, target, (layers, *matrix), Quantizing(torch.bfloat16, format), kept)
    assert [i for part in parts for i in range(*part.rows)] == [*range(layers)]
    for part in parts:
        rows = range(*part.rows)
        assert {i in kept for i in rows} == {part.leaf.wire == Plain(torch.bfloat16)}, (
            "rows that have the format, or rows that have none"
        )
        if isinstance(part.leaf.wire, Quantizing):
            assert part.bytes <= BUCKET_BYTES or len(rows) == 1, "codes, and scales beside them"
            assert part.leaf.full.local_shape(part.leaf.shape) == (len(rows), *target.local_shape((1, *matrix))[1:])
    batches = batches_of(parts)
    assert sorted(i for batch in batches for i in batch) == ([] if stays else [*range(len(parts))])
    for batch in batches:
        assert len({type(parts[i].leaf.wire) for i in batch}) == 1, "codes and numbers travel apart"
        assert len(batch) == 1 or sum(parts[i].bytes for i in batch) <= BUCKET_BYTES


def test_one_gather_takes_codes():
    assert travels_as_codes(plan_steps(CUT, WHOLE), None) and travels_as_codes(plan_steps(CUT, WHOLE), (1,))
    rows, none = fs.NamedSharding(MESH, fs.P("dp")), fs.NamedSharding(MESH)
    assert travels_as_codes(plan_steps(rows, none), None)
    assert not travels_as_codes(plan_steps(rows, none), ()), "of rows that are joined some have no format"
    assert not travels_as_codes(plan_steps(CUT, CUT), None)
    assert not travels_as_codes((Step("gather", ("dp",), 1), Step("slice", ("dp",), 1)), None)
