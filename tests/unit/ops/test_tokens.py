"""Token ids where they enter: any whole numbers, and none that the vocabulary does not have."""

import functools

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fsharding import ops
from fsharding.base.errors import DataError
from tests import helpers

V, D = 6, 4
TABLE, LOGITS = torch.randn(V, D), torch.randn(2, 3, V)
IDS = torch.tensor([[0, 1, 5], [2, 2, 4]])


refusal = functools.partial(helpers.refusal, kind=DataError)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_whole_numbers_of_any_width_are_ids(dtype):
    assert torch.equal(ops.embedding(IDS.to(dtype), TABLE), TABLE[IDS])
    assert torch.equal(ops.cross_entropy(LOGITS, IDS.to(dtype)), ops.cross_entropy(LOGITS, IDS))


def test_what_is_no_id():
    assert refusal(lambda: ops.embedding(IDS.float(), TABLE)) == (
        "fs.ops.embedding needs tokens that are integers, got float32[2, 3].\nPass tokens.long()."
    )
    assert refusal(lambda: ops.cross_entropy(LOGITS, IDS > 1)) == (
        "fs.ops.cross_entropy needs targets that are integers, got bool[2, 3].\nPass targets.long()."
    )


def test_ids_outside_the_vocabulary():
    assert refusal(lambda: ops.embedding(IDS + 2, TABLE)) == (
        "fs.ops.embedding got tokens outside the vocabulary.\n  2 of 6, the first is 7\nIds are 0 to 5. "
        "Use a vocab_size of at least 8, or the tokenizer of this model."
    )
    targets = torch.tensor([[0, -100, 5], [-1, 6, -100]])
    assert refusal(lambda: ops.cross_entropy(LOGITS, targets)) == (
        "fs.ops.cross_entropy got targets outside the vocabulary.\n  2 of 6, the first is -1\nIds are 0 to 5, or -100 to ignore. "
        "Use a vocab_size of at least 7, or the tokenizer of this model."
    )
    losses = ops.cross_entropy(LOGITS, torch.tensor([[0, -100, 5], [1, 2, -100]]))
    assert losses[0, 1] == losses[1, 2] == 0 and losses.count_nonzero() == 4
    assert ops.embedding(IDS[:0], TABLE).shape == (0, 3, D)


def test_transforms_and_traces_pass():
    assert torch.equal(torch.func.vmap(lambda ids: ops.embedding(ids, TABLE))(IDS), TABLE[IDS])
    outside = IDS + 9
    with FakeTensorMode() as mode:
        assert ops.cross_entropy(mode.from_tensor(LOGITS), mode.from_tensor(outside)).shape == (2, 3)
    assert ops.embedding(IDS.to("meta"), TABLE.to("meta")).shape == (2, 3, D)
