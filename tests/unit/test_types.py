"""Types of public signatures: a type checker refuses arguments that the functions refuse, before anything runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsharding as fs
from tests.helpers import slow

ROOT = Path(fs.__file__).parents[1]

# The lines that are wrong end in `# wrong`; the others are right.
SOURCE = """
import torch
import fsharding as fs

fs.zero(3)
fs.zero(7)  # wrong
fs.zero("3")  # wrong
mesh = fs.make_mesh(dp=-1, tp=2, device="cpu", transport="native")
fs.make_mesh(data=2)  # wrong
fs.make_mesh(2)  # wrong
fs.make_mesh(dp="2")  # wrong
fs.make_mesh(dp=1, device=0)  # wrong
fs.make_mesh(dp=1, timeout=5)  # wrong
fs.make_mesh(dp=1, transport="rdma")  # wrong
fs.AxisRules(mlp="tp", embed=("dp", "ep"))
fs.AxisRules({"mlp": "tp"})  # wrong
layout = fs.plan_layout({"w": torch.zeros(4)}, mesh, strategy="zero3")
fs.plan_layout({"w": torch.zeros(4)}, mesh, strategy=fs.zero(1))
fs.plan_layout({"w": torch.zeros(4)}, mesh, strategy="fsdp")  # wrong
fs.plan_layout({"w": torch.zeros(4)}, mesh, fs.zero(3))  # wrong
fs.plan_layout({"w": torch.zeros(4)}, "cpu")  # wrong
fs.plan_layout({"w": torch.zeros(4)}, mesh, precision="bf16")  # wrong
layout.with_strategy("zero1")
layout.with_strategy("zero7")  # wrong
opt = fs.adamw(1e-3, weight_decay=0.1)
fs.adamw(lr=1e-3)  # wrong
fs.adamw(1e-3, betas=(0.9, 0.95))  # wrong
key = fs.random.key(0)
state = fs.init_state(lambda key: {"w": fs.random.normal(key, (4,))}, opt, key, layout)
fs.init_state(lambda key: {"w": fs.random.normal(key, (4,))}, opt, layout, key)  # wrong
fs.init_state(lambda key: {"w": fs.random.normal(key, (4,))}, opt, 0, layout)  # wrong
step = fs.make_train_step(lambda params, batch: fs.tree.vdot(params, params), opt)
fs.make_train_step(lambda params, batch: fs.tree.vdot(params, params), torch.optim.SGD)  # wrong
state, metrics = step(state, {})
step(state)  # wrong
step({}, state)  # wrong
metrics.loss
fs.checkpoint.save("ckpt", state)
fs.checkpoint.load("ckpt")  # wrong
fs.fully_shard  # wrong
fs.optim.AdamW  # wrong
"""


@slow
def test_a_type_checker_refuses_what_the_functions_refuse(tmp_path):
    checker = Path(sys.executable).with_name("basedpyright")
    if not checker.exists():
        found = shutil.which("basedpyright")
        if found is None:
            pytest.skip("no basedpyright")
        checker = Path(found)
    (tmp_path / "calls.py").write_text(SOURCE)
    config = {"typeCheckingMode": "basic", "extraPaths": [str(ROOT)], "reportUnusedExpression": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [checker, "--outputjson", "--pythonpath", sys.executable, "-p", tmp_path / "pyrightconfig.json"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    errors = [d for d in json.loads(run.stdout)["generalDiagnostics"] if d["severity"] == "error"]
    lines = SOURCE.split("\n")
    wrong = {n for n, line in enumerate(lines) if line.endswith("# wrong")}
    refused = {d["range"]["start"]["line"] for d in errors}
    assert not [lines[n] for n in wrong - refused], "are let through"
    assert not [
        (lines[d["range"]["start"]["line"]], d["message"]) for d in errors if d["range"]["start"]["line"] not in wrong
    ]
    assert len(wrong) > 20
