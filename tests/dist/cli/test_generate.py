"""`fsharding generate` on ranks that wait already: one text, printed once, whatever the mesh of the run and of the verb."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import tyro

import fsharding as fs
from fsharding.apps.cli.generate import _generate, check_generate
from fsharding.apps.cli.options import GenerateConfig
from fsharding.testing import run_ranks
from tests.helpers import mesh_of

CONFIG = fs.models.DecoderConfig(vocab_size=256, dim=32, layers=2, heads=4, kv_heads=2, intermediate_size=48)


def save(folder: Path) -> None:
    """A checkpoint of two ranks."""
    start = fs.adamw(1e-3), fs.random.key(0), "zero3"
    state, _ = fs.setup(fs.models.decoder(CONFIG), None, *start, mesh=mesh_of({"dp": 2}))
    fs.checkpoint.save(folder, state, extra={"model": fs.hf.config_json(CONFIG)})


def printed(ranks: int, *arguments: str) -> str:
    """What a rank prints."""
    config = tyro.cli(GenerateConfig, args=[*arguments, "--prompt", "def ", "--tokens", "20", "--timeout", "20"])
    check_generate(config, ranks)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        _generate(config)
    return out.getvalue()


@pytest.mark.parametrize("mesh", ["", "dp=2"])
def test_rank_0_prints_the_text_of_one_process(mesh: str, tmp_path: Path):
    path = tmp_path / "saved"
    run_ranks(save, 2, path)
    first, second = run_ranks(printed, 2, 2, str(path), "--mesh", mesh)
    assert second == "" and first == printed(1, str(path)) and first.startswith("def ") and len(first) > 14
