"""`fsharding train --optimizer`: what it trains with, and that a run goes on with the optimizer that it began with."""

from dataclasses import replace

import pytest

from fsharding import checkpoint
from fsharding.apps.cli.config import check
from fsharding.apps.cli.options import TrainConfig
from fsharding.apps.cli.train import train
from fsharding.apps.cli.usage import OPTIMIZERS
from fsharding.base.errors import CheckpointError, ConfigError
from fsharding.models.presets import recipe
from tests.commands import read_metrics

STATES = {"lion": "mu.blocks.wq", "muon": "mu.blocks.wq", "adafactor": "row.blocks.wq"}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question; " * 40)
    data = str(tmp_path / "text")
    return TrainConfig(tmp_path / "out", data=data, steps=1, batch=2, seq=32, plot=False, policy="nothing_saveable")


@pytest.mark.parametrize("name", STATES)
def test_an_optimizer_trains_and_resumes(config, name):
    config = replace(config, optimizer=name)
    check(config, 1)
    train(config)
    again = replace(config, steps=2, resume="newest")
    check(again, 1)
    train(again)
    rows = read_metrics(config.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["lr"] == pytest.approx(OPTIMIZERS[name] * recipe("tiny").learning_rate / recipe("tiny").warmup)
    paths = checkpoint.metadata(config.checkpoints / "2").tree
    group = "stacked" if name == "muon" else "matrix"
    assert f"opt_state.states.1.groups.{group}.{STATES[name]}" in paths
    assert ("opt_state.states.1.groups.matrix.nu.embed.table" in paths) == (name == "muon")


def test_another_optimizer_is_another_run(config):
    check(config, 1)
    train(config)
    with pytest.raises(CheckpointError) as caught:
        check(replace(config, resume="newest", optimizer="lion"), 1)
    assert "\n  --optimizer: adamw in the checkpoint, lion now\n" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        check(replace(config, optimizer="adam"), 1)
    text = (
        "fsharding train knows no --optimizer 'adam'.\nUse one of adamw, lion, muon, adafactor. Did you mean 'adamw'?"
    )
    assert str(caught.value) == text
