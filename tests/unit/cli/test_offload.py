"""`--offload`: kinds of memory by role and path, and of activations."""

import json

import pytest

import fsharding as fs
from fsharding.apps.cli.config import offloaded
from fsharding.apps.cli.doctor import _disk
from fsharding.apps.cli.options import PlanConfig
from fsharding.apps.cli.verbs import run_plan
from fsharding.base.errors import ConfigError
from fsharding.contrib import disk
from fsharding.sharding.memory_kinds import parse_memory
from tests.helpers import refusal


def test_the_strategy_and_the_policy_of_an_option():
    text = "activations=host, moments=host ,main.blocks=disk"
    strategy, policy = offloaded("fsharding train", "zero3", text)
    assert strategy == fs.zero(3).with_memory(moments="host", main={"blocks": "disk"})
    assert policy == "offload"
    assert offloaded("fsharding train", "zero1", "") == (fs.zero(1), "save_except_gathered")
    assert offloaded("fsharding train", "zero3", text, "save_except_gathered")[1] == "offload"
    assert offloaded("fsharding train", "zero3", text, "offload_inputs")[1] == "offload_inputs"
    assert offloaded("fsharding train", "zero3", "activations=device", "nothing_saveable")[1] == "nothing_saveable"


@pytest.mark.parametrize(
    ("text", "policy", "said"),
    [
        ("activations=disk", "save_except_gathered", "got activations=disk: device or host"),
        ("activations=host", "nothing_saveable", "got activations=host and --policy nothing_saveable"),
    ],
)
def test_activations_that_cannot_be_kept_so(text, policy, said):
    assert f"fsharding train --offload {said}" in refusal(offloaded, "fsharding train", "zero3", text, policy)


@pytest.mark.parametrize("text", ["moment=host", "moments=tape", "moments", "=host", "compute=disk"])
def test_unknown_roles_and_kinds(text):
    with pytest.raises(ConfigError, match="got unknown roles or memory kinds"):
        parse_memory(text)


def test_a_plan_says_where_bytes_are_and_how_many_are_copied(capsys):
    run_plan(PlanConfig("tiny", mesh="dp=2", offload="moments=host,main=disk,grads=host", json=True))
    row = json.loads(capsys.readouterr().out)["stages"][0]
    held, copied = row["bytes"], row["copied"]
    assert (held["host"], held["disk"]) == (held["opt_state"] + held["grads"], held["main"])
    assert held["device"] == held["params"] and held["total"] == held["device"] + held["host"] + held["disk"]
    assert copied == {"host": 2 * held["opt_state"] + 3 * held["grads"], "disk": 3 * held["main"]}
    run_plan(PlanConfig("tiny", mesh="dp=2", offload="compute=host", json=True))
    row = json.loads(capsys.readouterr().out)["stages"][0]
    held, copied = row["bytes"], row["copied"]
    assert held["host"] == held["opt_state"] + held["main"]
    assert copied == {"host": held["grads"] + held["main"], "disk": 0}, "gradients to the host, parameters from it"
    run_plan(PlanConfig("tiny", mesh="dp=2", offload="moments=disk"))
    printed = capsys.readouterr().out
    assert "device   disk" in printed and "copied in a step of one microbatch: disk 0." in printed


def test_the_doctor_measures_the_disk(tmp_path, monkeypatch):
    finding = _disk()
    assert "GB/s" in finding.value and not finding.wrong
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FSHARDING_DISK", str(tmp_path / "file"))
    disk._file.cache_clear()
    assert "cannot make a file in" in _disk().wrong
    disk._file.cache_clear()
