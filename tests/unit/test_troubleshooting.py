"""Each row of Troubleshooting and contributing/errors.md that one process can show: the mistake is made, the words compared.

A row is (mistake, words of the message, edit). The words are in the message, and so is the edit, unless the row is in
OWN_EDIT, where the message does not say what to type yet and the page does. tests/dist/test_troubleshooting.py has the
rows that take several ranks.
"""

import contextlib
import dataclasses
import io
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fsharding as fs
from fsharding.apps.cli.main import main
from fsharding.checkpoint.manifest import text_of
from tests.helpers import slow
from tests.pages import code_spans, errors_of, said

CONFIG = fs.models.DecoderConfig(vocab_size=8, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=8)
DECODER = fs.models.decoder(CONFIG)
ONE_PROCESS = errors_of(without="Several ranks")


def init(key):
    first, last = fs.random.split(key)
    return {
        "body": {"w": fs.random.normal(first, (8, 4)), "b": fs.random.zeros((8,))},
        "head": {"weight": fs.random.normal(last, (3, 8))},
    }


def loss_fn(params, batch):
    body, head = fs.gather_unit(params["body"]), fs.gather_unit(params["head"])
    x = F.linear(torch.tanh(F.linear(batch["x"], body["w"], body["b"])), head["weight"])
    return (x - batch["y"]).square().sum(), len(x)


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """All that a mistake may need, once."""
    mesh, key, opt = fs.make_mesh(dp=1), fs.random.key(0), fs.adamw(1e-3, weight_decay=0.1)
    layout = fs.plan_layout(init(key), mesh)
    state, x = fs.init_state(init, opt, key, layout), torch.arange(24.0).view(6, 4) / 24
    batch, folder = {"x": x, "y": x[:, :3]}, tmp_path_factory.mktemp("ckpt")
    fs.checkpoint.save(folder / "7", state)
    return SimpleNamespace(
        mesh=mesh, key=key, opt=opt, layout=layout, state=state, batch=batch, folder=folder,
        step=fs.make_train_step(loss_fn, opt), module=torch.nn.Linear(4, 3),
        grads=fs.value_and_grad(loss_fn, grads=layout.main)(state.params, batch),
    )  # fmt: skip


def in_loss(fn):
    return lambda at: fs.value_and_grad(fn)(at.state.params, at.batch)


def in_step(fn):
    return lambda at: fs.make_train_step(fn, at.opt)(at.state, at.batch)


def drawn_twice(params, batch, key):
    x = fs.random.dropout(batch["y"], 0.5, key)
    return fs.random.dropout(x @ fs.gather_unit(params["head"])["weight"], 0.5, key).sum()


def one_draw(key):
    w = fs.random.normal(key, (8, 4))
    return {"first": w, "second": w}


def in_place(params, batch):
    head = fs.gather_unit(params["head"])
    head["weight"].mul_(2)
    return head["weight"].sum()


class Counting(torch.nn.BatchNorm1d):
    """A norm in eval mode that counts its calls."""

    def __init__(self):
        super().__init__(4)
        self.register_buffer("calls", torch.zeros(()))
        self.eval()

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def run_module(module):
    return fs.functionalize(module, ())({"weight": torch.ones(4), "bias": torch.zeros(4)}, torch.ones(3, 4))


def at_rest(at):
    state = fs.init_state(init, at.opt, at.key, at.layout)
    with torch.no_grad():
        state.params["head"]["weight"].mul_(2)
    at.step(state, at.batch)


def appending(x, kept):
    kept.append(x.sum())
    return x.square().sum()


SCALER = torch.amp.GradScaler("cpu")


def scaled_by_torch(params, batch):
    total, count = loss_fn(params, batch)
    return SCALER.scale(total), count


def donated(at):
    state = fs.init_state(init, at.opt, at.key, at.layout)
    fs.make_train_step(loss_fn, at.opt, donate=True)(state, at.batch)
    at.step(state, at.batch)


def decode(at, tokens, **axes):
    state = fs.init_state(DECODER, at.opt, at.key, fs.plan_layout(DECODER, at.mesh))
    fs.make_train_step(DECODER, at.opt)(state, tokens)


def fill_an_expert(at):
    experts = fs.models.Experts(count=4, active=1, intermediate_size=8, capacity=1.0)
    model = fs.models.decoder(
        fs.models.DecoderConfig(vocab_size=8, dim=8, layers=1, heads=2, kv_heads=1, experts=experts)
    )
    state = fs.init_state(model, at.opt, at.key, fs.plan_layout(model, at.mesh))
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    fs.make_train_step(model, at.opt)(state, {"tokens": tokens, "targets": tokens})


def command(line):
    """The error that a command prints, raised as an exception of its text."""

    def run(at):
        output = io.StringIO()
        with contextlib.redirect_stderr(output), pytest.raises(SystemExit) as end:
            main([word.replace("DIR", str(at.folder)) for word in line.split()])
        assert end.value.code == 2
        raise ValueError(output.getvalue())

    return run


def hf_saved(at, name, config, **options):
    """A directory of Hugging Face, and the layout that it is read in."""
    model = fs.models.decoder(config)
    layout = fs.plan_layout(model, at.mesh)
    params = fs.init_state(model, at.opt, at.key, layout).params
    return fs.hf.save(at.folder / name, params, config, layout, **options).path, layout


def saved_twice(at):
    folder, layout = hf_saved(at, "twice", CONFIG, max_file_bytes=1000)
    other, _ = hf_saved(at, "once", CONFIG)
    (other / "model.safetensors").rename(folder / "model.safetensors")
    fs.hf.load(folder, layout)


def untied(at):
    config = dataclasses.replace(CONFIG, tied=True)
    folder, layout = hf_saved(at, "tied", config)
    other, _ = hf_saved(at, "untied", CONFIG)
    (other / "model.safetensors").replace(folder / "model.safetensors")
    fs.hf.load(folder, layout)


def word_level(folder, names):
    """The path of a tokenizer with these tokens, of which the last one is special."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {name: i for i, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=names[0]))
    made.add_special_tokens([names[-1]])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def packed(documents, **options):
    return next(fs.data.packed(documents, **{"batch_size": 2, "seq_len": 32, "eos": 0, **options}))


def other_sizes(at):
    options = {"batch_size": 2, "eos": 0}
    before = fs.data.packed([[1, 2, 3]], seq_len=2, **options)
    fs.data.packed([[1, 2, 3]], seq_len=3, **options).load_state_dict(before.state_dict())


def other_data_ranks(at):
    data = fs.data.packed([[1, 2, 3]], batch_size=2, seq_len=2, eos=0)
    fs.checkpoint.save(at.folder / "two", at.state, data=data)
    manifest = fs.checkpoint.metadata(at.folder / "two")
    ranks = {"ranks": [{}, {}]}
    (at.folder / "two" / "manifest.json").write_text(text_of(dataclasses.replace(manifest, data=ranks)))
    fs.checkpoint.load(at.folder / "two", at.layout, data=data)


def megatron_run(at):
    run = fs.models.decoder(dataclasses.replace(CONFIG, rope_base=500_000.0))
    state = fs.init_state(run, at.opt, fs.random.key(0), fs.plan_layout(run, at.mesh))
    saved = fs.megatron.save(at.folder / "iter_0000000", state, dataclasses.replace(CONFIG, rope_base=500_000.0))
    fs.megatron.load(saved.path, fs.plan_layout(DECODER, at.mesh), CONFIG)


def saved_data_set(at):
    (at.folder / "saved").mkdir()
    (at.folder / "saved" / "state.json").write_text("{}")
    command("train --data DIR/saved --out DIR/run")(at)


def missing_column(at):
    word_level(at.folder, ["<unk>", "</s>"])
    (at.folder / "a.jsonl").write_text('{"body": "x"}')
    command("train --data DIR/a.jsonl --tokenizer DIR/tokenizer.json --out DIR/run")(at)


def no_end(at):
    word_level(at.folder, ["<unk>", "to", "be", "<end>"])
    command("train --tokenizer DIR/tokenizer.json --out DIR/run")(at)


def large_tokenizer(at):
    word_level(at.folder, [*map(str, range(300)), "</s>"])
    command("train --tokenizer DIR/tokenizer.json --out DIR/run")(at)


def whole_params(at):
    return {"body": at.state.params["body"], "head": {"weight": torch.ones(3, 8)}}


MISTAKES = {
    # -------------------------------------------------------------------------------------------- meshes and layouts
    "`fs.make_mesh(data=2)`": lambda at: fs.make_mesh(data=2),
    "`fs.make_mesh(2)`": lambda at: fs.make_mesh(2),
    "`fs.make_mesh(dp=3)` without a launcher": lambda at: fs.make_mesh(dp=3),
    '`strategy="fsdp"`': lambda at: fs.plan_layout(init(at.key), at.mesh, strategy="fsdp"),
    "`fs.plan_layout(model, mesh, fs.zero(3))`": lambda at: fs.plan_layout(init(at.key), at.mesh, fs.zero(3)),
    '`precision="bf16"`': lambda at: fs.plan_layout(init(at.key), at.mesh, precision="bf16"),
    "a dim without a rule": lambda at: fs.plan_layout(
        {"w": torch.zeros(8, 4)}, at.mesh, names={"w": (None, "hidden")}
    ),
    "`names` without a leaf": lambda at: fs.plan_layout(
        init(at.key), at.mesh, names={"head": {"weight": (None, None)}}
    ),
    "`names` of the wrong length": lambda at: fs.plan_layout({"w": torch.zeros(8, 4)}, at.mesh, names={"w": ("mlp",)}),
    '`frozen=["heads"]` for the leaf `head`': lambda at: fs.plan_layout(init(at.key), at.mesh, frozen=["heads"]),
    "heads that `tp` does not divide": lambda at: fs.plan_layout(DECODER, fs.AbstractMesh(("tp",), (3,))),
    "`tp=2` for a model without named dims, such as PEFT's": lambda at: (
        fs.plan_layout({"w": torch.zeros(8, 4)}, fs.AbstractMesh(("tp",), (2,)))
    ),
    "a state on an `AbstractMesh`": lambda at: fs.init_state(
        init, at.opt, at.key, fs.plan_layout(init(at.key), fs.AbstractMesh(("dp",), (2,)))
    ),
    # ---------------------------------------------------------------------------------------- models and their states
    "`fs.plan_layout(nn_module, mesh)`": lambda at: fs.plan_layout(at.module, at.mesh),
    "`fs.plan_layout(init, mesh)`": lambda at: fs.plan_layout(init, at.mesh),
    "`fs.init_state(init, opt, 0, layout)`": lambda at: fs.init_state(init, at.opt, 0, at.layout),
    "`torch.Generator` for a key": lambda at: fs.random.normal(torch.Generator(), (2, 2)),
    "`net(params, x)` with batch norms in train mode": lambda at: run_module(torch.nn.BatchNorm1d(4)),
    "a forward that writes its own buffer": lambda at: run_module(Counting()),
    "`fs.functionalize(module)` of an unknown family": lambda at: fs.functionalize(
        torch.nn.Sequential(torch.nn.Linear(4, 3))
    ),
    "a plain tensor in `state.params`": lambda at: at.step(at.state.replace(params=whole_params(at)), at.batch),
    'a DTensor with a plain tensor: `state.params["w"] * x`': lambda at: (
        at.state.params["head"]["weight"] * torch.ones(3, 8)
    ),
    "`fs.init_state(params, opt, key, layout)`": lambda at: fs.init_state(
        at.state.params, at.opt, at.key, at.layout
    ),
    "`state.params` changed in place": at_rest,
    "one LazyTensor twice": lambda at: fs.setup(one_draw, loss_fn, at.opt, at.key, mesh=at.mesh),
    # ------------------------------------------------------------------------------------------------ loss functions
    "a leaf without `gather_unit`": in_loss(lambda p, b: F.linear(b["x"], p["body"]["w"]).sum()),
    "L2 over `fs.tree.leaves(params)`": in_loss(lambda p, b: p["body"]["w"].square().sum()),
    "`leaf.to_local()` in a loss": in_loss(lambda p, b: p["body"]["w"].to_local().sum()),
    "`state.params` in a loss": lambda at: fs.value_and_grad(
        lambda p, b: (b["x"] @ at.state.params["body"]["w"].T).sum()
    )(at.state.params, at.batch),
    "a recomputed block that appends to an argument": in_loss(lambda p, b: fs.remat(appending)(b["x"], [])),
    "gathered weights changed in place": in_loss(in_place),
    "`fs.scan_units` with a block of `lax.scan`: `(carry, w)`": in_loss(
        lambda p, b: fs.scan_units(lambda x, w: x @ w["w"].T, [p["body"]], b["x"]).sum()
    ),
    "`w * fs.random.normal(key, shape)` in a loss": in_loss(
        lambda p, b: (fs.gather_unit(p["body"])["w"] * fs.random.normal(fs.random.key(0), (8, 4))).sum()
    ),
    "`return loss, logits`": in_loss(lambda p, b: (torch.zeros(()), torch.zeros(2))),
    "`return loss.item()`": in_loss(lambda p, b: loss_fn(p, b)[0].item()),
    "`return losses.mean(), n`": in_loss(lambda p, b: ((b["y"] @ fs.gather_unit(p["head"])["weight"]).mean(), 6)),
    "a loss that is detached, or of other weights": in_step(lambda p, b: loss_fn(p, b)[0].detach()),
    "`F.dropout`, `random.random()` or `np.random` in a loss": in_step(lambda p, b: F.dropout(b["y"] @ fs.gather_unit(p["head"])["weight"]).sum()),
    "one key for two draws": in_step(drawn_twice),
    "`.backward()` outside of a step": lambda at: loss_fn(at.state.params, at.batch)[0].backward(),
    "`GradScaler.scale` in a loss": in_step(scaled_by_torch),
    "`loss.backward()`": lambda at: at.grads[0][0].backward(),
    "`torch.func.grad(f)(state.params)`": lambda at: torch.func.grad(lambda p: loss_fn(p, at.batch)[0])(
        at.state.params
    ),
    "`torch.func.grad` inside `fs.value_and_grad`": in_loss(
        lambda p, b: torch.func.grad(lambda x: x.sum())(fs.gather_unit(p["head"])["weight"]).sum()
    ),
    "`x @ w.T` if the precision computes in a format": lambda at: fs.value_and_grad(
        lambda p, b: (b["x"].bfloat16() @ fs.gather_unit(p["body"])["w"].T).sum(),
        precision=fs.Precision(compute=fs.formats.MXFP8),
    )(at.state.params, at.batch),
    "`w.to(torch.float8_e4m3fn)` of a gathered weight": in_loss(
        lambda p, b: (b["x"] @ fs.gather_unit(p["body"])["w"].to(torch.float8_e4m3fn).float().T).sum()
    ),
    "`policy=\"everything\"`": lambda at: fs.make_train_step(loss_fn, at.opt, policy="everything"),
    # ------------------------------------------------------------------------------------------ optimizers and steps
    "`fs.optim(1e-3)`, or a call of another namespace": lambda at: fs.optim(1e-3),
    "a class, or a factory, as a schedule": lambda at: fs.adamw(fs.optim.schedules.warmup_cosine),
    "`fs.make_train_step(loss_fn, torch.optim.RMSprop)`": lambda at: fs.make_train_step(loss_fn, torch.optim.RMSprop),
    "`opt.update(grads, opt_state)`": lambda at: at.opt.update(at.grads[1], at.state.opt_state),
    "`opt.update(opt_state, grads, params)`": lambda at: at.opt.update(
        at.state.opt_state, at.grads[1], at.state.params
    ),
    "`grads, loss = fs.value_and_grad(...)`": lambda at: at.opt.update(
        at.grads[0], at.state.opt_state, at.state.params
    ),
    "`step(state.params, batch)`": lambda at: at.step(at.state.params, at.batch),
    "`step(batch, state)`": lambda at: at.step(at.batch, at.state),
    "`fs.evaluate(step)`": lambda at: fs.evaluate(at.step),
    "None as gradients": lambda at: fs.update(at.state, None, at.opt),
    "`state = step(state, batch)`, twice": lambda at: at.step(at.step(at.state, at.batch), at.batch),
    "a donated state": donated,
    '`metrics["loss"]`': lambda at: at.step(at.state, at.batch)[1]["loss"],
    "NaN in loss or gradients": lambda at: at.step(at.state, {**at.batch, "x": at.batch["x"] * float("nan")}),
    "a batch without counted tokens": in_step(lambda p, b: (loss_fn(p, b)[0], 0)),
    "an infinite count": in_step(lambda p, b: (loss_fn(p, b)[0], float("inf"))),
    # ------------------------------------------------------------------------------------------------------- batches
    "NumPy arrays in a batch": lambda at: at.step(at.state, fs.tree.map(lambda x: x.numpy(), at.batch)),
    "`step(state, loader)`": lambda at: at.step(at.state, DataLoader([at.batch])),
    "`float64` inputs, or `int32` classes": lambda at: at.step(at.state, {**at.batch, "x": at.batch["x"].double()}),
    "class weights in a batch": lambda at: fs.make_train_step(
        loss_fn, at.opt, microbatches=2
    )(at.state, {**at.batch, "classes": torch.ones(4)}),
    "a full expert of `Experts(capacity=)`": fill_an_expert,
    "indivisible microbatches": lambda at: fs.make_train_step(loss_fn, at.opt, microbatches=4)(
        at.state, at.batch
    ),
    "a missing entry of a batch": lambda at: at.step(at.state, {"x": at.batch["x"]}),
    "shapes that don't match": lambda at: at.step(at.state, {**at.batch, "x": torch.zeros(6, 5)}),
    "tokens outside the vocabulary": lambda at: decode(
        at, {"tokens": torch.full((2, 4), 9), "targets": torch.zeros(2, 4, dtype=torch.int64)}
    ),
    # ---------------------------------------------------------------------------------------------------------- data
    '`fs.data.packed("corpus.jsonl", ...)`': lambda at: packed("corpus.jsonl"),
    "a `DatasetDict`": lambda at: packed({"train": [[1]]}),
    "a generator or stream": lambda at: packed(x for x in [[1]]),
    "an empty data set": lambda at: packed([]),
    "empty documents": lambda at: packed(["", ""], tokenizer=lambda text: list(text.encode())),
    "too few tokens for a row": lambda at: packed([[1, 2, 3], [4, 5, 6]]),
    "rows of several columns": lambda at: packed([{"body": "x", "id": 1}], tokenizer=lambda text: list(text.encode())),
    "texts without a tokenizer": lambda at: packed(["to be"]),
    "a path for a tokenizer": lambda at: packed(["to be"], tokenizer="tokenizer.json"),
    "a tokenizer larger than the model": lambda at: packed(["to be"], vocab_size=8, tokenizer=lambda text: [8]),
    "a new tokenizer or sizes after a restart": other_sizes,
    "a checkpoint saved without `data=`": lambda at: fs.checkpoint.load(
        at.folder / "7", at.layout, data=fs.data.packed([[1, 2, 3]], batch_size=2, seq_len=2, eos=0)
    ),
    "a loader on a different number of data ranks": other_data_ranks,
    # ----------------------------------------------------------------------------------- checkpoints and other layouts
    '`fs.checkpoint.save("s3://bucket/run/1", state)`': lambda at: fs.checkpoint.save("s3://bucket/run/1", at.state),
    "`fs.checkpoint.save(state, path)`": lambda at: fs.checkpoint.save(at.state, "ckpt"),
    "`fs.checkpoint.load(path, state)`": lambda at: fs.checkpoint.load("ckpt", at.state),
    "a directory without a checkpoint": lambda at: fs.checkpoint.load(at.folder / "none", at.layout),
    "a different model's checkpoint": lambda at: fs.checkpoint.load(
        at.folder / "7", fs.plan_layout(DECODER, at.mesh), opt=at.opt
    ),
    "a different optimizer's": lambda at: fs.checkpoint.load(
        at.folder / "7", at.layout, opt=fs.sgd(0.1, momentum=0.9)
    ),
    "a `config.json` of a different model": lambda at: fs.hf.save(
        at.folder / "hf", DECODER.init(fs.random.key(0)), dataclasses.replace(CONFIG, eps=0.1), fs.plan_layout(DECODER, at.mesh)
    ),
    "an unknown entry of `config.json`": lambda at: fs.hf.config_of(
        {**fs.hf.config_json(CONFIG), "no_such_field": 3}
    ),
    "two saves in a directory": saved_twice,
    "tied weights that differ in the file": untied,
    "a Megatron run that differs from the config": megatron_run,
    "`fs.reshard(state, mesh)`": lambda at: fs.reshard(at.state, at.mesh),
    # ------------------------------------------------------------------------------------------------------ pipelines
    '`schedule="1F1B"`': lambda at: fs.pipeline.plan_schedule("1F1B", 2, 4),
    # --------------------------------------------------------------------------------------------------- command line
    "`--strategy fsdp`": command("train --strategy fsdp --out DIR/run"),
    "`--mesh dp=3 --ranks 2`": command("train --mesh dp=3 --ranks 2 --out DIR/run"),
    "`--preset llama3`": command("train --preset llama3 --out DIR/run"),
    "`--resume newest` without a checkpoint": command("train --resume newest --out DIR/empty"),
    "`--data` of a saved data set, no tokenizer": saved_data_set,
    "no column of `--text-column`": missing_column,
    "a tokenizer without an end-of-document token": no_end,
    "a tokenizer larger than the preset": large_tokenizer,
    "an indivisible global batch": command("train --ranks 2 --batch 3 --out DIR/run"),
}  # fmt: skip

OWN_EDIT = {
    'a DTensor with a plain tensor: `state.params["w"] * x`',
    "`.backward()` outside of a step",
}


@slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_page_says_what_the_library_says(at, mistake):
    words, edit = ONE_PROCESS[mistake]
    message = said(MISTAKES[mistake], at)
    assert not [part for part in code_spans(words) if part not in message], message
    missing = [part for part in code_spans(edit) if part not in message]
    assert bool(missing) == (mistake in OWN_EDIT), f"{missing} of the edit\n{message}"


def test_every_row_is_tested():
    assert {*ONE_PROCESS} == {*MISTAKES} and {*MISTAKES} >= OWN_EDIT
