"""Parts of a stack that are sent by a wire: they tile the leaf, and none is larger than a bucket."""

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding import formats
from fsharding.comm.codes import Quantizing
from fsharding.comm.redistribute import BUCKET_BYTES, plan_rows, sends_encoded
from fsharding.comm.steps import steps_of
from fsharding.comm.wires import Plain

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
    wire = Quantizing(torch.bfloat16, format)
    parts = plan_rows(steps_of(CUT, target, (layers, *matrix)), wire, kept)
    assert [i for part in parts for i in range(part.start, part.stop)] == [*range(layers)]
    for part in parts:
        rows = range(part.start, part.stop)
        assert {i in kept for i in rows} == {part.wire == Plain(torch.bfloat16)}, (
            "rows that have the format, or rows that have none"
        )
        if part.wire == wire:
            size = part.steps.parts(wire).bytes
            assert size <= BUCKET_BYTES or len(rows) == 1, "codes, and scales beside them"
        assert part.steps.received == (len(rows), *target.local_shape((1, *matrix))[1:])
        assert [step.kind for step in part.steps.steps] == ([] if stays else ["gather"])


def test_one_gather_takes_codes():
    rows, none = fs.NamedSharding(MESH, fs.P("dp")), fs.NamedSharding(MESH)
    of = partial(steps_of, shape=(4, 6, 6))
    assert sends_encoded(of(CUT, WHOLE), None) and sends_encoded(of(CUT, WHOLE), (1,))
    assert sends_encoded(of(rows, none), None)
    assert not sends_encoded(of(rows, none), ()), "of rows that are joined some have no format"
    assert not sends_encoded(of(CUT, CUT), None)
    assert not sends_encoded(of(CUT, fs.NamedSharding(MESH, fs.P(None, ("tp", "dp")))), None), "a gather, then a slice"
