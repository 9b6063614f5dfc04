"""Laws of `fs.data.packed`: rows are cuts of one stream, a batch depends on its number alone, and a position is exact."""

import copy
import itertools
import json
import pickle
import sys
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


class Lines:
    """A stream that begins anew each time, and counts what it has given."""

    def __init__(self, documents):
        self.documents, self.given = documents, 0

    def __iter__(self):
        for document in self.documents:
            self.given += 1
            yield document


class Stateful(Lines):
    """One whose position is its own."""

    def __init__(self, documents):
        super().__init__(documents)
        self.at = 0

    def __iter__(self):
        while self.at < len(self.documents):
            self.at += 1
            self.given += 1
            yield self.documents[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


KINDS = {"list": list, "iterable": Lines, "stateful": Stateful}

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


@pytest.mark.parametrize("kind", ["list", "stateful"])
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
    again.load_state_dict(position)
    after = next(again)
    assert len(read) <= 3 and getattr(source, "given", 0) <= 32
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


def test_epochs_end():
    data = fs.data.packed([[1, 2, 3]] * 5, batch_size=2, seq_len=4, eos=EOS, epochs=2, seed=None)
    assert len([*data]) == 4  # 40 tokens; the last one has no target
    assert [*data] == []
    assert "has no batch 4: 2 epochs end after 4 batches." in refusal(data.batch, 4)
    assert torch.equal(data.batch(0)["tokens"][0], torch.tensor([1, 2, 3, 0]))


def test_it_is_copied_with_its_position(tokenizer):
    data = fs.data.packed(TEXTS, batch_size=2, seq_len=3, tokenizer=tokenizer)
    next(data)
    for other in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert torch.equal(next(other)["tokens"], data.batch(1)["tokens"]) and repr(other) == repr(data)


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


# -------------------------------------------------------------------------------------------------- files, tokenizers
WORDS = ["<unk>", "</s>", "to", "be", "or", "not", "that", "is"]
TEXTS = ["to be or not to be", "that is", "", "not that"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    path = tmp_path_factory.mktemp("tokenizer")
    made.save(str(path / "tokenizer.json"))
    return path


def words(text):
    return [WORDS.index(word) for word in text.split()]


def test_tokenizers_of_all_kinds_give_the_same(tokenizer):
    from tokenizers import Tokenizer

    file = tokenizer / "tokenizer.json"
    kinds = [tokenizer, str(file), Tokenizer.from_file(str(file))]
    made = [fs.data.packed(TEXTS, batch_size=1, seq_len=6, tokenizer=kind, seed=None) for kind in kinds]
    want = [x for text in TEXTS if text for x in (*words(text), 1)]
    for data in made:
        assert next(data)["tokens"].tolist() == [want[:6]] and (data.vocab_size, data.eos) == (8, 1)
        assert data.fingerprint() == made[0].fingerprint()
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "or"}}))
    assert fs.data.packed(TEXTS, batch_size=1, seq_len=6, tokenizer=tokenizer).eos == 4
    (tokenizer / "tokenizer_config.json").unlink()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved", "saved_dict", "streaming"])
def test_data_sets_of_files(kind, tmp_path, tokenizer, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = datasets.Dataset.from_dict({"text": TEXTS * 20, "other": ["x"] * 80})
    path, options = tmp_path / "data", {}
    if kind in ("jsonl", "streaming"):
        path.mkdir()
        (path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        options = {"streaming": kind == "streaming"}
    elif kind == "parquet":
        path = tmp_path / "a.parquet"
        made.to_parquet(path)
    else:
        (made if kind == "saved" else datasets.DatasetDict(train=made)).save_to_disk(path)
    sizes = {"batch_size": 3, "seq_len": 5, "tokenizer": tokenizer}
    want = fs.data.packed(TEXTS * 20, seed=None, **sizes)
    data = fs.data.packed(fs.data.open_documents(path, **options), seed=None, **sizes)
    for step in range(30):
        assert torch.equal(next(data)["tokens"], want.batch(step)["tokens"])
    again = fs.data.packed(fs.data.open_documents(path, **options), seed=None, **sizes)
    again.load_state_dict(data.state_dict())
    assert torch.equal(next(again)["tokens"], want.batch(30)["tokens"])


def test_what_is_written_is_what_is_packed(tmp_path, tokenizer):
    count = fs.data.write_tokens(tmp_path / "a.bin", TEXTS, tokenizer=tokenizer)
    data = fs.data.open_data(str(tmp_path / "a.bin"), batch_size=1, seq_len=4, documents=True)
    want = [x for text in TEXTS if text for x in (*words(text), 1)]
    assert data.stream.tolist() == want and count == len(want) and data.vocab_size == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.bin.json"]
    assert "got no tokens" in refusal(fs.data.write_tokens, tmp_path / "b.bin", [[]], eos=0, vocab_size=4)
    assert not [*tmp_path.glob("*b.bin*")]


def test_a_worker_reads_ahead(tokenizer, monkeypatch):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        data = fs.data.packed(TEXTS * 9, batch_size=2, seq_len=5, tokenizer=tokenizer)
        generator = torch.Generator().manual_seed(0)
        return loaders.StatefulDataLoader(data, batch_size=None, num_workers=1, generator=generator)

    want = fs.data.packed(TEXTS * 9, batch_size=2, seq_len=5, tokenizer=tokenizer)
    first = loader()
    got = [batch["tokens"] for batch in itertools.islice(first, 3)]
    again = loader()
    again.load_state_dict(first.state_dict())
    got += [batch["tokens"] for batch in itertools.islice(again, 2)]
    assert all(torch.equal(x, want.batch(step)["tokens"]) for step, x in enumerate(got))
    monkeypatch.setattr(
        sys.modules["fsharding.apps.data.packed"], "get_worker_info", lambda: SimpleNamespace(num_workers=2)
    )
    assert "cannot divide its rows among 2 workers of a loader" in refusal(iter, want)


# ------------------------------------------------------------------------------------------------------------ refusals
@slow
def test_positions_of_other_data_are_refused():
    options = {"batch_size": 2, "seq_len": 3, "eos": EOS}
    data = fs.data.packed([[1, 2, 3], [4, 5]], **options)
    other = fs.data.packed([[1, 2, 3], [4, 6]], **{**options, "seq_len": 4})
    text = refusal(other.load_state_dict, data.state_dict())
    assert text.startswith("Packed.load_state_dict got a position in other data.\n") and "seq_len: 3 in" in text
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
        ({"documents": "a text"}, "fs.data.packed takes documents, got 'a text'.\nOpen it: fs.data.open_documents(path); or give a list of texts."),
        ({"documents": iter([[1]])}, "fs.data.packed cannot begin a list_iterator again: it can be read once.\nGive a list, or an object whose __iter__ begins anew, with state_dict and load_state_dict if it can."),
        ({"documents": {"train": [[1]]}}, "fs.data.packed takes documents, got a dict of train.\nChoose one of its splits: documents['train']."),
        ({"documents": [[]]}, "fs.data.packed got no tokens: every document is empty.\nGive documents that have text."),
        ({"documents": [[1, 2]]}, "fs.data.packed got 3 tokens in all documents; a row takes 5.\nGive more documents, or seq_len 2 or less."),
        ({"documents": [[1, 2, 3, 4]], "epochs": 1}, "fs.data.packed got 5 tokens in all documents; a batch takes 9.\nGive more documents, more epochs, or smaller sizes."),
        ({"documents": ["text"]}, "fs.data.packed got text without a tokenizer.\nGive tokenizer='tokenizer.json', or documents that are lists of ids."),
        ({"documents": [{"body": "x"}], "column": "text"}, "fs.data.packed finds no column 'text' in the documents.\nGive one of 'body'."),
        ({"vocab_size": 3}, "fs.data.packed got a document with the id 5, outside [0, 3).\nGive the vocab_size of the model that the tokenizer belongs to."),
        ({"tokenizer": "nowhere.json"}, "fs.data.packed cannot read a tokenizer: there is no nowhere.json.\nGive a tokenizer.json, or a directory that has one, as save_pretrained writes it."),
        ({"tokenizer": 3}, "fs.data.packed takes a tokenizer, got 3.\nGive the path of a tokenizer.json, a tokenizer of tokenizers or transformers, or a function text -> ids."),
        ({"eos": "</s>"}, "fs.data.packed cannot look up eos '</s>' without a tokenizer.\nGive its id, or tokenizer='tokenizer.json'."),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_mistakes(change, text):
    options = {"documents": [[1, 2, 3, 4, 5]], "batch_size": 2, "seq_len": 4, "eos": EOS, **change}
    assert refusal(lambda: next(fs.data.packed(options.pop("documents"), **options))) == text


def test_tokenizers_that_do_not_fit(tokenizer, tmp_path):
    sizes = {"batch_size": 1, "seq_len": 2, "tokenizer": tokenizer}
    text = refusal(fs.data.packed, TEXTS, vocab_size=7, **sizes)
    assert text == (
        "fs.data.packed got a tokenizer of 8 tokens for a model of vocab_size 7.\n"
        "Give the model a vocabulary of 8 or more, or a smaller tokenizer."
    )
    assert "got eos '<end>', which is no token of the tokenizer.\n  '</s>' has the id 1\n" in refusal(
        fs.data.packed, TEXTS, eos="<end>", **sizes
    )
    file = tmp_path / "tokenizer.json"
    file.write_text((tokenizer / "tokenizer.json").read_text().replace("</s>", "<end>"))
    text = refusal(fs.data.packed, TEXTS, **{**sizes, "tokenizer": file})
    assert text == (
        "fs.data.packed cannot tell which token of the tokenizer ends a document.\n  '<end>' has the id 1\n"
        "Give one of its tokens, such as eos='<end>', or its id."
    )
    file.write_text("{}")
    assert "as a tokenizer: " in refusal(fs.data.packed, TEXTS, **{**sizes, "tokenizer": file})


def test_paths_that_are_no_documents(tmp_path):
    read = fs.data.open_documents
    assert "it is not there" in refusal(read, tmp_path / "nowhere")
    assert "found no files in" in refusal(read, tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    assert "no text in UTF-8, at byte 0" in refusal(read, tmp_path)
    (tmp_path / "b.jsonl").write_text("{}")
    assert "finds files of 2 kinds" in refusal(read, tmp_path)
