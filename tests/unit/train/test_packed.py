"""Laws of `fs.data.packed`: rows are cuts of one stream, a batch depends on its number alone, and a position is exact."""

import copy
import itertools
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from tests.helpers import refusal, slow

EOS = 0


def of_text(text):
    return list(text.encode())


class Asked:
    """A data set indexed by number, for several at once, and counts what it has given."""

    def __init__(self, documents):
        self.documents, self.given = documents, 0

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, number):
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers):
        self.given += len(numbers)
        return [self.documents[number] for number in numbers]


KINDS = {"list": list, "asked": Asked, "rows": lambda documents: [{"text": x} for x in documents]}

DOCUMENTS = st.lists(st.lists(st.integers(1, 50), max_size=12), min_size=1, max_size=50)
NUMBERS = st.integers(0, 6)


@st.composite
def arguments(draw):
    documents, seq_len = draw(DOCUMENTS), draw(st.integers(1, 7))
    shortest = seq_len + 1 - sum(len(d) + 1 for d in documents if d)
    if shortest > 0:
        documents = [*documents, [7] * shortest]
    sizes = {"batch_size": draw(st.integers(1, 6)), "seq_len": seq_len}
    return documents, {**sizes, "eos": EOS, "boundaries": draw(st.booleans())}


def stream(documents, size):
    """Documents that are not empty, each with its end, over and over: ids, and which document each is of."""
    whole = [(x, number) for number, d in enumerate(filter(None, documents)) for x in (*d, EOS)]
    ids, owners = zip(*itertools.islice(itertools.cycle(whole), size), strict=True)
    epochs = np.arange(size) // len(whole)
    return np.array(ids), np.array(owners) + epochs * (whole[-1][1] + 1)


@given(arguments(), st.sampled_from(sorted(KINDS)), NUMBERS)
def test_rows_are_cuts_of_the_documents_joined(given_, kind, step):
    documents, options = given_
    data = fs.data.packed(KINDS[kind](documents), seed=None, **options)
    rows, length = options["batch_size"], options["seq_len"]
    size = rows * length
    ids, owners = stream(documents, (step + 1) * size + 1)
    batch = data.batch(step)
    tokens, targets = (ids[step * size + i :][:size].reshape(rows, length) for i in (0, 1))
    owner, after = (owners[step * size + i :][:size].reshape(rows, length) for i in (0, 1))
    assert batch["tokens"].tolist() == tokens.tolist()
    if not options["boundaries"]:
        assert [*batch] == ["tokens", "targets"] and batch["targets"].tolist() == targets.tolist()
        return
    assert batch["targets"].tolist() == np.where(owner == after, targets, -100).tolist()
    assert batch["documents"].tolist() == (owner - owner[:, :1]).tolist()


@given(arguments(), st.sampled_from(sorted(KINDS)), st.data())
def test_global_batches_do_not_depend_on_the_number_of_data_ranks(given_, kind, draw):
    documents, options = given_
    one = fs.data.packed(KINDS[kind](documents), seed=3, **options)
    rows = options["batch_size"]
    count = draw.draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0]))
    ranks = [fs.data.packed(KINDS[kind](documents), seed=3, **options) for _ in range(count)]
    for step in range(3):
        whole = next(one)
        parts = [data.batch(step, fs.data.Shard(index, count)) for index, data in enumerate(ranks)]
        for name, x in whole.items():
            assert x.dtype == torch.int64 and torch.equal(torch.cat([part[name] for part in parts]), x)


@given(arguments(), st.sampled_from(sorted(KINDS)), NUMBERS, st.one_of(st.none(), st.integers(0, 2**100)))
def test_going_on_from_a_position_is_never_having_stopped(given_, kind, step, seed):
    documents, options = given_
    data = fs.data.packed(KINDS[kind](documents), seed=seed, **options)
    for _ in range(step):
        next(data)
    position = json.loads(json.dumps(data.state_dict()))
    rest = [next(data) for _ in range(3)]
    again = fs.data.packed(KINDS[kind](documents), seed=seed, **options)
    again.load_state_dict(position)
    for number, want in enumerate(rest, start=step):
        assert again.state_dict()["step"] == number
        assert all(torch.equal(x, want[name]) for name, x in next(again).items())
    assert again.state_dict() == data.state_dict()
    for number in (step + 1, 0, step):  # a batch is a function of its number, wherever the position is
        fresh = fs.data.packed(KINDS[kind](documents), seed=seed, **options).batch(number)
        assert all(torch.equal(x, fresh[name]) for name, x in again.batch(number).items())


@pytest.mark.parametrize("kind", ["list", "asked"])
def test_going_on_reads_no_more_than_a_chunk_again(kind):
    read = []

    def tokenizer(text):
        read.append(text)
        return of_text(text)

    documents = [f"document {i}" for i in range(1000)]
    options = {"batch_size": 2, "seq_len": 8, "tokenizer": tokenizer, "eos": EOS, "seed": 1}
    data = fs.data.packed(KINDS[kind](documents), **options)
    before = [data.batch(step) for step in range(600)][-1]
    position = data.state_dict()
    read.clear()
    source = KINDS[kind](documents)
    again = fs.data.packed(source, **options)
    again.load_state_dict(position)  # 16 samples tell whether the documents are the same
    after = next(again)
    assert len(read) <= 3 and getattr(source, "given", 0) <= 48
    assert torch.equal(after["tokens"], data.batch(600)["tokens"]) and not torch.equal(
        after["tokens"], before["tokens"]
    )


def test_each_epoch_has_every_document_in_another_order():
    documents = [[i] * 3 for i in range(1, 41)]
    data = fs.data.packed(documents, batch_size=4, seq_len=10, eos=EOS, seed=5)
    epochs = [
        torch.cat([next(data)["tokens"].flatten() for _ in range(4)]).view(40, 4)[:, 0].tolist() for _ in range(3)
    ]
    assert all(sorted(epoch) == [*range(1, 41)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0][:6] == [32, 22, 13, 10, 28, 11]  # it never changes


def test_a_batch_spans_epochs():
    data = fs.data.packed([[1, 2, 3]] * 5, batch_size=2, seq_len=4, eos=EOS, seed=None)
    assert all(next(data)["tokens"].tolist() == [[1, 2, 3, 0]] * 2 for _ in range(4))  # 32 tokens, of 20 in an epoch
    assert data.state_dict()["epoch"] == 1


def test_it_is_copied_with_its_position():
    data = fs.data.packed(TEXTS, batch_size=2, seq_len=3, tokenizer=words, eos=1)
    next(data)
    for other in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert torch.equal(next(other)["tokens"], data.batch(1)["tokens"])
        assert "batch_size=2, seq_len=3" in repr(other)


def test_documents_have_the_losses_that_each_has_alone():
    model = fs.models.decoder(
        fs.models.DecoderConfig(vocab_size=64, dim=16, layers=2, heads=2, kv_heads=2, intermediate_size=16)
    )
    params = fs.tree.map(lambda draw: draw.tensor(), model.init(fs.random.key(0)))

    def losses(batch):
        x = model.embed(params["embed"], batch)
        for i in range(2):
            x = model.block(fs.tree.map(lambda stack: stack[i], params["blocks"]), x)  # noqa: B023
        return model.head(params["head"], x, batch)

    documents = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    batch = fs.data.packed(documents, batch_size=1, seq_len=11, eos=EOS, seed=None, boundaries=True).batch(0)
    total, count = losses(batch)
    alone = [
        losses({"tokens": x[None, :-1], "targets": x[None, 1:]}) for d in documents for x in [torch.tensor([*d, EOS])]
    ]
    torch.testing.assert_close(total, sum(loss for loss, _ in alone))
    assert int(count) == sum(int(n) for _, n in alone) == 9


# -------------------------------------------------------------------------------------------------- other packages
WORDS = ["<unk>", "</s>", "to", "be", "or", "not", "that", "is"]
TEXTS = ["to be or not to be", "that is", "", "not that"]


def words(text):
    return [WORDS.index(word) for word in text.split()]


def test_texts_of_a_data_set_and_a_tokenizer():
    datasets, tokenizers = pytest.importorskip("datasets"), pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rows = datasets.Dataset.from_dict({"text": TEXTS, "other": ["x"] * 4})
    sizes = {"batch_size": 1, "seq_len": 6, "eos": 1, "vocab_size": 8, "seed": None}
    data = fs.data.packed(rows.select_columns(["text"]), tokenizer=lambda text: made.encode(text).ids, **sizes)
    want = [x for text in TEXTS if text for x in (*words(text), 1)]
    assert next(data)["tokens"].tolist() == [want[:6]] and (data.vocab_size, data.eos) == (8, 1)
    assert "got a dict as a document" in refusal(next, fs.data.packed(rows, tokenizer=words, **sizes))


def test_the_digest_of_a_tokenizer_is_part_of_a_position():
    class Encode:
        def __init__(self, digest):
            self.digest = digest

        def __call__(self, text):
            return words(text)

    one, two = (fs.data.packed(TEXTS, batch_size=1, seq_len=6, tokenizer=Encode(x), eos=1) for x in "ab")
    assert one.fingerprint() != two.fingerprint()
    assert "tokenizer: a in the position, b now" in refusal(two.load_state_dict, one.state_dict())


def test_a_worker_reads_ahead(monkeypatch):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        data = fs.data.packed(TEXTS * 9, batch_size=2, seq_len=5, tokenizer=words, eos=1)
        generator = torch.Generator().manual_seed(0)
        return loaders.StatefulDataLoader(data, batch_size=None, num_workers=1, generator=generator)

    want = fs.data.packed(TEXTS * 9, batch_size=2, seq_len=5, tokenizer=words, eos=1)
    first = loader()
    got = [batch["tokens"] for batch in itertools.islice(first, 3)]
    again = loader()
    again.load_state_dict(first.state_dict())
    got += [batch["tokens"] for batch in itertools.islice(again, 2)]
    assert all(torch.equal(x, want.batch(step)["tokens"]) for step, x in enumerate(got))
    monkeypatch.setattr("fsharding.apps.data.get_worker_info", lambda: SimpleNamespace(num_workers=2))
    assert "cannot divide its rows among 2 workers of a loader" in refusal(iter, want)


# ------------------------------------------------------------------------------------------------------------ refusals
@slow
def test_positions_of_other_data_are_refused():
    options = {"batch_size": 2, "seq_len": 3, "eos": EOS}
    data = fs.data.packed([[1, 2, 3], [4, 5]], **options)
    other = fs.data.packed([[1, 2, 3], [4, 6]], **{**options, "seq_len": 4})
    text = refusal(other.load_state_dict, data.state_dict())
    assert text.startswith("fs.data.packed.load_state_dict got a position in other data.\n") and "seq_len: 3 in" in text
    assert "documents: 2 documents, " in text
    place = data.state_dict()
    for wrong in (
        {},
        None,
        {"step": -1, "data": {}},
        {**place, "mark": "0"},
        {**place, "offset": -1},
        {**place, "x": 1},
    ):
        assert "got no position of packed documents." in refusal(data.load_state_dict, wrong)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch_size": 0}, "fs.data.packed got arguments out of range.\n  batch_size is 0: not positive.\nGive positive sizes and a seed >= 0."),
        ({"documents": []}, "fs.data.packed got no documents: the data set is empty.\nGive one with rows."),
        ({"documents": "a text"}, "fs.data.packed takes documents, got 'a text'.\nGive a list of texts or of ids, or a data set indexed by number, such as documents['train']."),
        ({"documents": iter([[1]])}, "fs.data.packed takes documents, got a list_iterator.\nGive a list of texts or of ids, or a data set indexed by number, such as documents['train']."),
        ({"documents": {"train": [[1]]}}, "fs.data.packed takes documents, got a dict of train.\nGive a list of texts or of ids, or a data set indexed by number, such as documents['train']."),
        ({"documents": [[]]}, "fs.data.packed got 0 tokens in all documents; a row takes 5.\nGive more documents."),
        ({"documents": [[1, 2]]}, "fs.data.packed got 3 tokens in all documents; a row takes 5.\nGive more documents, or seq_len 2 or less."),
        ({"documents": ["text"]}, "fs.data.packed got 'text' as a document, without a tokenizer.\nGive texts and tokenizer=, or lists of ids; of rows one column, documents.select_columns(['text'])."),
        ({"documents": [{"body": "x", "y": 1}], "tokenizer": of_text}, "fs.data.packed got a dict as a document, with a tokenizer.\nGive texts and tokenizer=, or lists of ids; of rows one column, documents.select_columns(['text'])."),
        ({"documents": [[[1], [1, 2]]]}, "fs.data.packed got a list as a document, without a tokenizer.\nGive texts and tokenizer=, or lists of ids; of rows one column, documents.select_columns(['text'])."),
        ({"vocab_size": 3}, "fs.data.packed got a document with the id 5, outside [0, 3).\nGive the vocab_size of the model that the tokenizer belongs to."),
        ({"tokenizer": 3}, "fs.data.packed takes a tokenizer from text to ids, got 3.\nGive a function: lambda text: tokenizer.encode(text, add_special_tokens=False).ids."),
        ({"eos": 9, "vocab_size": 8}, "fs.data.packed got eos 9 for vocab_size 8.\nGive an id."),
        ({"eos": "</s>"}, "fs.data.packed got eos '</s>' for vocab_size None.\nGive an id."),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_mistakes(change, text):
    options = {"documents": [[1, 2, 3, 4, 5]], "batch_size": 2, "seq_len": 4, "eos": EOS, **change}
    assert refusal(lambda: next(fs.data.packed(options.pop("documents"), **options))) == text
