"""Every parser under random damage: a value or an error of ours, in a second and 200 MB, and never a hang or a crash.

A process of its own runs them with a limit on its memory, so that a crash, too, is a failing example. Guarantee:
whatever the bytes of a file are, reading it gives a value or an `FshardingError`; and safetensors gives what
safetensors would give.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import fsharding as fs
from fsharding import checkpoint as ck
from fsharding.apps.data import open_data
from fsharding.base.errors import FshardingError
from fsharding.checkpoint import manifest as manifests
from fsharding.checkpoint.chunks import from_metadata
from fsharding.checkpoint.serialized_layout import layout_of
from fsharding.interop import hf
from fsharding.interop.hf.loading import open_folder
from tests import checkpoints
from tests.checkpoints import small_draws
from tests.commands import read_metrics
from tests.helpers import full, slow

ROOT = Path(__file__).resolve().parents[3]
BYTES = 200 << 20
HANGS = 120
DEFAULT, FULL = 150, 10_000


# ------------------------------------------------------------------------------------------------------------ mutations
TOKENS = [
    b"NaN", b"Infinity", b"1e400", b"-1", b"-0", b"1.5", b"9" * 5000, str(2**63).encode(), str(2**62).encode(), b"null",
    b"true", b"[]", b"{}", b'""', b'"a"', b'"\\ud800"', b'"\\u0000"', b'"../x"', b'"/etc/passwd"', b"[" * 300, b'{"a":'
    * 300, b"[[],[]]", b'{"a":1,"a":2}', b'"\x1b[31m"', b"\xff\xfe", b"\xed\xa0\x80", b"\x00", b",", b":", b'"', b"\\",
    b"\n", b"2\x86" * 40, b"\x94h\x00\x86", b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 7 + b"\x7f",
    b"}K\x01\x85s", b"cposix\nsystem\n", b"\x8c\x05posix\x8c\x06system\x93", b"R", b"b", b"(", b"\x81", b"\x93", b"u",
    b"e", b".", b"\x8f\x90", ]  # fmt: skip
VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|null|true|false|\[\]|\{\}')
"""Of JSON."""

CHANGES = st.tuples(
    st.sampled_from(["flip", "set", "cut", "insert", "repeat", "end", "value", "value", "swap"]),
    st.integers(0, 2**20),
    st.integers(0, 2**20),
    st.sampled_from(TOKENS) | st.binary(max_size=6),
)
DAMAGE = st.lists(CHANGES, min_size=1, max_size=5)


def damaged(data: bytes, changes) -> bytes:
    """Bytes after some changes; each is what a random edit, or somebody who knows the format, would do."""
    for kind, a, b, token in changes:
        at = a % (len(data) + 1)
        length = b % 32
        if kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << b % 8)]) + data[at + 1 :]
        elif kind == "set":
            data = data[:at] + token + data[at + len(token) :]
        elif kind == "cut":
            data = data[:at] + data[at + length :]
        elif kind == "insert":
            data = data[:at] + token + data[at:]
        elif kind == "repeat":
            data = data[: at + length] + data[at:]
        elif kind == "end":
            data = data[:at]
        elif kind == "value" and (found := list(VALUE.finditer(data))):
            chosen = found[a % len(found)]
            data = data[: chosen.start()] + token + data[chosen.end() :]
        elif kind == "swap" and (found := list(VALUE.finditer(data))):
            one, two = sorted((found[a % len(found)], found[b % len(found)]), key=lambda m: m.start())
            if one.end() <= two.start():
                between = data[one.end() : two.start()]
                data = data[: one.start()] + two[0] + between + one[0] + data[two.end() :]
    return data


# -------------------------------------------------------------------------------------------------------------- parsers
# Each takes an empty directory, fills it, and returns what reads it again after the bytes that it is given were damaged.
Reader = Callable[[bytes], object]


planned = functools.partial(checkpoints.planned, model=small_draws)


def saved(folder: Path) -> Path:
    ck.save(folder / "12", fs.init_state(small_draws, fs.adamw(1e-2), fs.random.key(3), planned()), extra={"seed": 1})
    return folder / "12"


def load_all(path: Path) -> None:
    """All that reads a checkpoint; each is tried, whatever the one before says."""
    for read in (
        lambda: layout_of(ck.metadata(path), fs.AbstractMesh(("dp",), (2,))),
        lambda: (found := ck.inspect(path), str(found), json.dumps(found.to_json())),
        lambda: ck.load(path, planned()),
    ):
        with contextlib.suppress(FshardingError):
            read()
    assert ck.latest(path.parent) in (None, path)


def manifest(folder: Path) -> tuple[bytes, Reader]:
    """The manifest, damaged by chance, and by somebody who then sealed it again."""
    path = saved(folder)
    file = path / "manifest.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        load_all(path)
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(found, dict):
            found.pop("sha256", None)
            text = json.dumps({**found, "sha256": manifests._seal(found)})
            file.write_text(text)
            load_all(path)

    return file.read_bytes(), read


def metadata(folder: Path) -> tuple[bytes, Reader]:
    """DCP's pickle, alone and in a checkpoint whose manifest says that all is well."""
    path = saved(folder)
    file, said = path / ".metadata", ck.metadata(path)
    truth = file.read_bytes()

    def read(data: bytes) -> None:
        for told in (None, said):
            with contextlib.suppress(FshardingError):
                from_metadata(path, data, told)
        file.write_bytes(data)
        blocks = [data[i : i + manifests.BLOCK] for i in range(0, len(data), manifests.BLOCK)]
        own = ck.SavedFile(len(data), tuple(hashlib.sha256(block).hexdigest() for block in blocks))
        for chunks in (None, said.chunks):
            sealed = dataclasses.replace(said, files={**said.files, ".metadata": own}, chunks=chunks)
            (path / "manifest.json").write_text(manifests.text_of(sealed))
            for call in (lambda: ck.inspect(path), lambda: ck.load(path, planned())):
                with contextlib.suppress(FshardingError):
                    call()

    return truth, read


def torch_file(folder: Path) -> tuple[bytes, Reader]:
    """A file of `torch.save`: a zip with a pickle in it."""
    file = folder / "weights"
    torch.save({"w": torch.ones(3, 2).t(), "b": {"c": [torch.ones(2, dtype=torch.bfloat16), 3]}}, file)
    return file.read_bytes(), _of_weights(file)


def _of_weights(file: Path) -> Reader:
    def read(data: bytes) -> None:
        file.write_bytes(data)
        weights = fs.foreign.open_weights(file)
        for name, leaf in weights.leaves.items():
            weights.read(name, tuple((0, size) for size in leaf.shape), torch.empty(leaf.shape, dtype=leaf.dtype))

    return read


def safetensors_header(folder: Path) -> tuple[bytes, Reader]:
    """A safetensors file, beside what the safetensors library says of it."""
    file = folder / "weights"
    tensors = {"w": torch.ones(3, 2), "b.c": torch.ones((), dtype=torch.int64), "e": torch.ones(0, 3)}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    ours = _of_weights(file)

    def read(data: bytes) -> None:
        ours(data)
        if data[:1] == b"{" or data[:2] == b"PK":
            return
        try:
            theirs_of = safetensors.safe_open(file, "pt")
        except safetensors.SafetensorError:
            return  # it refuses the whole file for one entry that we leave out
        with theirs_of as theirs:
            found = fs.foreign.open_weights(file)
            assert {*theirs.keys()} == {*found.leaves}
            for name, leaf in found.leaves.items():
                want = theirs.get_tensor(name)
                found.read(name, tuple((0, size) for size in leaf.shape), out := torch.empty_like(want))
                assert (tuple(want.shape), want.dtype) == (leaf.shape, leaf.dtype)
                raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (want, out)]
                assert torch.equal(*raw)

    return file.read_bytes(), read


def index(folder: Path) -> tuple[bytes, Reader]:
    """The index of several safetensors files."""
    for name in ("a.safetensors", "b.safetensors"):
        safetensors.torch.save_file({f"{name[0]}.w": torch.ones(2)}, folder / name)
    file = folder / "model.safetensors.index.json"
    table = {"a.w": "a.safetensors", "b.w": "b.safetensors"}
    text = json.dumps({"metadata": {"total_size": 16}, "weight_map": table}).encode()

    def read(data: bytes) -> None:
        file.write_bytes(data)
        for each in (open_folder, fs.foreign.open_weights):
            with contextlib.suppress(FshardingError):
                each(folder)

    return text, read


def config(folder: Path) -> tuple[bytes, Reader]:
    """A `config.json`, the plan of what it says, and weights beside it that it says are codes."""
    file = folder / "config.json"
    decoder = fs.models.DecoderConfig(
        vocab_size=16, dim=8, layers=2, heads=2, kv_heads=1, intermediate_size=12, qk_norm=True
    )
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    entries = hf.config_json(decoder) | {"rope_parameters": scaled, "layer_types": ["full_attention"] * 2}
    coded = {"w": torch.ones(4, 6).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(2, 2)}
    safetensors.torch.save_file(coded, folder / "model.safetensors")
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [2, 3], "activation_scheme": "dynamic"}
    entries |= {"quantization_config": blocks}

    def read(data: bytes) -> None:
        file.write_bytes(data)
        with contextlib.suppress(FshardingError):
            weights = fs.foreign.open_weights(folder)
            for name, leaf in weights.leaves.items():
                weights.read(name, tuple((0, n) for n in leaf.shape), torch.empty(leaf.shape))
        found = hf.config_of(folder)
        fs.plan_layout(fs.models.decoder(found), fs.AbstractMesh(("dp",), (2,)))
        hf.config_json(found)

    return json.dumps(entries).encode(), read


def tokens(folder: Path) -> tuple[bytes, Reader]:
    """Token ids, and the file beside them that says what they are."""
    file, beside = folder / "a.bin", folder / "a.bin.json"
    size = {"batch_size": 2, "seq_len": 4}

    def read(data: bytes) -> None:
        beside.write_bytes(data)
        for content in (bytes(range(64)), data):
            file.write_bytes(content)
            for documents in (False, True):
                with contextlib.suppress(FshardingError):
                    found = open_data(str(file), **size, documents=documents)
                    found.batch(3), found.fingerprint()

    return b'{"dtype": "uint16", "vocab_size": 65536, "separator": 257}', read


def metrics(folder: Path) -> tuple[bytes, Reader]:
    """The rows of a run."""
    file = folder / "metrics.jsonl"
    rows = [{"step": i, "loss": 2.5, "grad_norm": None, "lr": 1e-3, "tokens": 128} for i in range(1, 5)]

    def read(data: bytes) -> None:
        file.write_bytes(data)
        for row in read_metrics(file):
            assert isinstance(row["step"], int)
            assert json.loads(json.dumps(row, allow_nan=False)) == row

    return "".join(json.dumps(row) + "\n" for row in rows).encode(), read


PARSERS = {
    each.__name__: each
    for each in (manifest, metadata, torch_file, safetensors_header, index, config, tokens, metrics)
}  # fmt: skip


def search(name: str, count: int) -> None:
    """Runs one parser on many damaged files; in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        data, read = PARSERS[name](Path(folder))
        read(data)

        phases = [Phase.explicit, Phase.generate, Phase.shrink]  # to explain takes memory of its own
        repeats = {"derandomize": count == DEFAULT, "database": None, "deadline": None, "phases": phases}

        @settings(max_examples=count, suppress_health_check=list(HealthCheck), **repeats)
        @example([("end", 0, 0, b"")])
        @example([("end", 0, 0, b""), ("insert", 0, 0, (10**9).to_bytes(8, "little") + b"{}")])
        @given(DAMAGE)
        def check(changes):
            bad = damaged(data, changes)
            with limited(), contextlib.suppress(FshardingError):
                read(bad)

        check()


@contextlib.contextmanager
def limited():
    """Ends the process if what is inside hangs, and refuses it more than `BYTES` of new memory."""
    with open("/proc/self/statm") as file:  # no assert: where the limit begins
        now = int(file.read().split()[0]) * resource.getpagesize()
    usual = resource.getrlimit(resource.RLIMIT_AS)
    faulthandler.dump_traceback_later(HANGS, exit=True)
    resource.setrlimit(resource.RLIMIT_AS, (now + BYTES, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
        faulthandler.cancel_dump_traceback_later()


def run(names: list[str], count: int) -> None:
    """Runs parsers in a new process, which ends with status 0 if all is well."""
    command = [sys.executable, str(Path(__file__)), str(count), *names]
    # Of this checkout, wherever the package is installed.
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    env = {**os.environ, **paths, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=env)
    assert found.returncode == 0, f"{' '.join(command)}\n{found.stdout[-3000:]}\n{found.stderr[-12000:]}"


@slow
def test_every_parser_gives_a_value_or_an_error_of_ours():
    run([*PARSERS], DEFAULT)


@full
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_under_much_damage(name):
    run([name], FULL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[2:]:
        search(each, int(sys.argv[1]))
        print(each, flush=True)
