"""URLs given as paths: every public call and command that takes a path refuses them, and writes nothing."""

import inspect
import os
from pathlib import Path
from types import ModuleType

import pytest

import fsharding as fs
from fsharding.apps.cli import main as cli
from fsharding.base.errors import ConfigError
from fsharding.base.local_paths import is_url
from tests.helpers import refusal

URL = "s3://bucket/run/1"


def taking_paths(space, name):
    """The public functions and classes with arguments that are annotated as paths, and those arguments."""
    found = {}
    for key in space.__all__:
        value = getattr(space, key)
        if isinstance(value, ModuleType) and hasattr(value, "__all__"):
            found |= taking_paths(value, f"{name}.{key}")
        elif inspect.isfunction(value) or (isinstance(value, type) and not hasattr(value, "__dataclass_fields__")):
            call = value.__init__ if isinstance(value, type) else value
            annotations = inspect.get_annotations(call) if inspect.isfunction(call) else {}
            paths = [argument for argument, kind in annotations.items() if "Path" in str(kind) and argument != "return"]
            found |= {f"{name}.{key}": (value, paths)} if paths else {}
    return found


CALLS = taking_paths(fs, "fs") | taking_paths(fs.data, "fs.data") | taking_paths(fs.megatron, "fs.megatron")


@pytest.mark.parametrize("name", CALLS)
def test_calls_refuse_urls(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, paths = CALLS[name]
    needed = {k: None for k, p in inspect.signature(call).parameters.items() if p.default is p.empty}
    needed |= {path: tmp_path / path for path in paths}
    needed |= {k: v for k, v in {"format": "torch", "paths": "params", "axes": {"dp": 1}}.items() if k in needed}
    for path in paths:
        for url in (URL, Path(URL), "file:///tmp/a", "hf://org/model"):
            text = refusal(call, **{**needed, path: url}, kind=ConfigError)
            assert f"takes paths of files and directories; got the URL {str(url)!r}.\nMount the storage" in text
            called = text.partition(" ")[0]
            assert name.startswith(called) or name.endswith(f".{called}"), text
    assert not os.listdir(tmp_path)


def test_what_is_found_has_paths():
    """What is called above is all of it, as far as annotations show."""
    found = {name: paths for name, (_, paths) in CALLS.items()}
    assert {"fs.checkpoint.save", "fs.checkpoint.Checkpointer", "fs.hf.config_of", "fs.megatron.load"} <= {*found}
    assert found["fs.foreign.export"] == found["fs.checkpoint.reshard_checkpoint"] == ["source", "target"]
    assert len(found) >= 19, found


def test_data_and_tokenizers_refuse_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert URL in refusal(fs.data.open_data, URL, batch_size=1, seq_len=2, kind=ConfigError)


@pytest.mark.parametrize(
    "args",
    [
        *([verb, URL] for verb in ("inspect", "generate")),
        *([verb, *pair, *more] for verb, more in (("export", ["--format", "torch"]), ("reshard", ["--mesh", "dp=2"])) for pair in ((URL, "out"), (".", URL))),
        *(["train", "--out", "run", f"--{option}", URL] for option in ("out", "data", "val-data", "tokenizer", "resume", "config")),
        ["export", ".", "out", "--format", "torch", "--names", URL],
        ["generate", ".", "--model", URL], ["generate", ".", "--tokenizer", URL],
    ],
    ids=" ".join,
)  # fmt: skip
def test_commands_refuse_urls(args, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "takes paths of files and directories; got" in error and "s3:/" in error, error
    assert error.startswith(f"ConfigError: fsharding {args[0]}") and not os.listdir(tmp_path)


def test_the_folder_of_leaves_on_disk_is_no_url(tmp_path, monkeypatch):
    from fsharding.contrib.disk import disk_folder

    monkeypatch.setenv("FSHARDING_DISK", URL)
    assert URL in refusal(disk_folder, kind=ConfigError)


@pytest.mark.parametrize(
    "path", ["run/1", "/data/s3:/x", "./a:b", "a:b/c", "C:/x", "step=1/a", "x/http://y", b"run", 3, None]
)
def test_paths_are_no_urls(path):
    assert not is_url(path)


@pytest.mark.parametrize("path", [URL, Path(URL), b"gs://b/c", "file:/tmp/x", "HTTPS://a", "git+ssh://a/b"])
def test_urls(path):
    assert is_url(path)
