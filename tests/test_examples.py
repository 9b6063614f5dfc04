"""What the documentation shows runs: the python blocks of its pages, and every file in examples/."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import fsharding as fs
from fsharding.testing import run_ranks
from tests.helpers import full, slow

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BESIDE_OTHERS = ["from-torch.md", "from-jax.md"]
PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for pattern in ("index.md", "how-to/*.md", "reference/*.md", "tutorials/*.md")
    for path in DOCS.glob(pattern)
    if "```python\n" in path.read_text(encoding="utf-8") and path.name not in BESIDE_OTHERS
)
# What these change in torch lasts as long as their process.
BY_THEMSELVES = {"how-to/test-sharded-code.md"}
pytestmark = [pytest.mark.timeout(900), slow]
SECONDS = 300

# What each example prints at its end, and what has to be in its output besides.
EXPECTED: dict[str, list[str]] = {
    "adopt.py": [
        r"^zero3 on 2 ranks: losses 1\.\d{4} to 0\.\d{4}, nu is float32\[8@dp, 16\]$",
        r"^the losses of a plain loop, to rounding$",
    ],
    "finetune_llama.py": [
        r"^mesh \{'tp': 2\}: \d+ bytes of parameters, on each rank \[\d+, \d+\]$",
        r"^before: loss 4\.\d{6} on 2 ranks, 4\.\d{6} in transformers$",
        r"^ after: loss \d\.\d{6} on 2 ranks, \d\.\d{6} in transformers$",
        r"^fine-tuned on the mesh, and the same in transformers$",
    ],
    "finetune_lora.py": [
        r"^before: loss 4\.\d{5} on two ranks, 4\.\d{5} in transformers$",
        r"^ after: loss 3\.\d{5} on two ranks, 3\.\d{5} in transformers$",
        r"^the tuned directory loads in transformers, with the adapters in its weights$",
    ],
    "diffusion.py": [r"^samples of the average are (2\.0\d|1\.9\d) from the origin, give or take 0\.[01]\d$"],
    "sam.py": [
        r"^zero3    adamw: errors 0\.\d{3}  loss 0\.\d{4}, uphill 0\.\d{4}$",
        r"^flatter and better with SAM, and equal in every bit under both strategies$",
    ],
    "offload.py": [
        r"^zero3 with grads on disk, moments on disk, params on disk: device 8, host 0, disk 8,388,608 bytes$",
        r"^losses 2\.\d+ to 1\.\d+, equal in every bit$",
        r"^seconds a step: \d+\.\d\d on disk, ",
    ],
    "ema_eval.py": [
        r"^step 120  error of the parameters 0\.\d{4}  of their average 0\.\d{4}$",
        r"^the average of w1 is float32\[33@dp, 2\], here \[17, 2\]$",
        r"^the average has \d\.\d times less error over the second half$",
    ],
    "lora.py": [
        r"^trained all  +275328 bytes of parameters   550664 bytes of optimizer state a rank$",
        r"^trained adapters   280704 bytes of parameters    10760 bytes of optimizer state a rank$",
        r"^the base has not changed in any bit, and the optimizer state is 51 times smaller$",
    ],
    "muon_vs_adamw.py": [
        r"^adamw  274760 bytes of optimizer state a rank  losses",
        r"^       groups\.matrix\.mu\.blocks\.wq is float32\[3, 48, 48@dp\]$",
        r"^muon is where adamw ends after [123]\d of 40 steps$",
    ],
    "dp_sgd.py": [
        r"^zero\(0\): accuracy 0\.\d+, 328 bytes",
        r"^zero\(3\): accuracy 0\.\d+, 164 bytes",
        r"^  norms of 128 samples: ",
        "the same noise$",
    ],
    "ensemble.py": [
        r"^zero\(3\): 8 members, hidden weights are float32\[2, 8, 32@dp, 32\], loss",
        "equal in every bit$",
    ],
    "hessian_spectrum.py": [
        r"^loss 0\.\d+; hidden weights are float32\[2, 16@dp, 16\]$",
        r"^zero\(3\) on 2 ranks: \d+\.\d{5} ",
        "agree$",
    ],
    "maml.py": [r"^zero\(3\): meta-gradients are float32\[32@dp, 32\], meta-loss", "learn to learn alike$"],
    "mlp.py": [r"^zero0: +\d+ bytes of state a rank", r"^zero3: +\d+ bytes of state a rank", "equal in every bit$"],
    "batch_norm.py": [
        r"^zero3: losses 0\.\d{4} .*, held out 0\.\d{4}$",
        r"^batches that the statistics have seen: 30$",
        r"plain torch, and equal in every bit under both strategies$",
    ],
    "own_module.py": [
        r"^5 units, 13 leaves$",
        r"^zero3: +\d+ bytes of state a rank, losses 2\.\d+",
        r"^right digits of the module by itself: (0\.9|1\.0)\d$",
        "equal in every bit$",
    ],
    "research_step.py": [
        r"^zero\(0\) on 2 ranks$",
        r"^  step 4  loss \d\.\d{6} .* gathers 0  reductions 6  units alive 0$",
        r"^zero\(3\) on 2 ranks$",
        r"^  step 4  loss \d\.\d{6} .* gathers 10  reductions 6  units alive [12]$",
        r"^  params\.blocks\.wq is float32\[4, 64, 64@dp\], here \[4, 64, 32\]$",
        "equal in every bit$",
    ],
    "nanogpt.py": [
        r"^'import .{20,}'$",
        r"^loss 2\.\d{3} on new rows, and 3 all-gathers for 2 texts of 60 tokens$",
    ],
    "pretrain.py": [
        r"^step  0  loss 5\.\d{5} on 2 ranks, 5\.\d{5} in a plain loop$",
        r"^step 23  loss 3\.\d{5} on 2 ranks, 3\.\d{5} in a plain loop$",
        r"^the curves are equal to rounding$",
    ],
    "test_my_reshard.py": [r"^25 random cases went there and back, equal in every bit$"],
}


def script_of(markdown: str) -> str:
    """The python blocks of a page, those in tabs too, as one script; each line keeps its number."""
    lines = [""] * (markdown.count("\n") + 1)
    for block in re.finditer(r"^( *)```python\n(.*?)^\1```$", markdown, re.MULTILINE | re.DOTALL):
        code = textwrap.dedent(block[2]).splitlines()
        first = markdown.count("\n", 0, block.start(2))
        lines[first : first + len(code)] = code
    return "\n".join(lines)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_runs(name: str):
    page = DOCS / name
    script = script_of(page.read_text(encoding="utf-8"))
    assert "assert" in script
    if name in BY_THEMSELVES:
        subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=SECONDS)
    else:
        exec(compile(script, str(page), "exec"), {"__name__": "__main__"})


ON_TWO = [DOCS.parent / "README.md", DOCS / "index.md", *sorted((DOCS / "tutorials").glob("*.md"))]
ON_TWO.remove(DOCS / "tutorials" / "first-steps.md")  # which runs under torchrun, below


def losses_of(page: str, folder: str) -> list[float]:
    """Run the blocks of a page as one script; directories that are temporary on the page are below a given one."""
    temporary = "__import__('contextlib').nullcontext({!r})"
    script, count = script_of(Path(page).read_text(encoding="utf-8")), itertools.count()
    script = re.sub(
        r"tempfile\.TemporaryDirectory\(\)", lambda _: temporary.format(os.path.join(folder, str(next(count)))), script
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, page, "exec"), names)
    return [float(loss) for loss in names.get("losses", [])]


@pytest.mark.parametrize("page", ON_TWO, ids=lambda path: path.name)
def test_the_page_runs_on_two_ranks(page: Path, tmp_path: Path):
    alone, first, second = (
        losses_of(str(page), str(tmp_path / "one")),
        *run_ranks(losses_of, 2, str(page), str(tmp_path / "two")),
    )
    assert first == second
    assert alone == pytest.approx(first, rel=1e-4)


CONCEPTS = 8


def test_the_first_tutorial_has_eight_concepts_before_the_first_step():
    page = (DOCS / "tutorials" / "first-steps.md").read_text(encoding="utf-8")
    numbered = re.findall(r"^(\d+)\. \*\*(.+?)\*\*", page, re.MULTILINE)
    assert [int(number) for number, _ in numbered] == [*range(1, CONCEPTS + 1)]
    before, _, _ = script_of(page).partition("step(state, batch)")
    names = {ast.unparse(x) for x in ast.walk(ast.parse(before + "None")) if isinstance(x, ast.Attribute)}
    library = {x for x in names if re.fullmatch(r"fs\.[\w.]+", x)} - {"fs.random"}
    # Random draws are one concept with three names, and the optimizer is no new one.
    draws = {"fs.random.split", "fs.random.key", "fs.random.normal", "fs.random.zeros", "fs.random.uniform"}
    assert library - draws == {"fs.gather_unit", "fs.Loss", "fs.adamw", "fs.setup", "fs.local_batch"}
    assert page.count("\n") < 150


def test_the_first_tutorial_runs_on_two_ranks(tmp_path: Path):
    script = script_of((DOCS / "tutorials" / "first-steps.md").read_text(encoding="utf-8"))
    # Both ranks have to write into one directory, which no rank can make by itself.
    script = script.replace("tempfile.TemporaryDirectory()", f"__import__('contextlib').nullcontext({str(tmp_path)!r})")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    on_two = run_example(tmp_path / "train.py", tmp_path, before=launcher)
    on_one = run_example(tmp_path / "train.py", tmp_path)
    pattern = r"^after 200 steps: (0\.\d{4}) on 256 held-out rows$"
    losses = [float(re.findall(pattern, output, re.MULTILINE)[0]) for output in (on_one, on_two)]
    assert abs(losses[0] - losses[1]) < 1e-3, losses
    assert on_two.count("after 200 steps") == 1, "rank 0 alone prints"


@pytest.mark.timeout(240)  # DeepSpeed compiles an extension when it is first used
@pytest.mark.parametrize("name", BESIDE_OTHERS)
def test_both_sides_of_the_page_have_equal_losses_on_two_ranks(name: str, tmp_path: Path):
    script = script_of((DOCS / "how-to" / name).read_text(encoding="utf-8"))
    assert "assert_close(ours, " in script
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert re.search(
        r"^equal losses: \d\.\d{4} ",
        run_example(tmp_path / "train.py", tmp_path, before=launcher, seconds=400),
        re.MULTILINE,
    )


WHOLE_SCRIPTS = {
    path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples" / "whole_script").glob("*.py")
}


def test_a_whole_script_has_at_most_half_the_lines_of_fsdp2s():
    counts = {title: sum(bool(line.strip()) for line in code.splitlines()) for title, code in WHOLE_SCRIPTS.items()}
    assert 2 * counts["train.py"] <= counts["train_fsdp2.py"], counts


ENDED = {
    "train.py": ("state.step < STEPS", "state.step < 10"),
    "train_fsdp2.py": ("scheduler), STEPS)", "scheduler), 10)"),
}


@pytest.mark.parametrize("title", WHOLE_SCRIPTS)
def test_a_whole_script_goes_on_where_it_was_ended(title: str, tmp_path: Path):
    code, launcher = WHOLE_SCRIPTS[title], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = code.replace(*ENDED[title])
    assert ended != code
    for folder, runs in {"whole": [code], "in two": [ended, code]}.items():
        (tmp_path / folder).mkdir()
        for run in runs:
            (tmp_path / title).write_text(run, encoding="utf-8")
            try:
                run_example(tmp_path / title, tmp_path, str(tmp_path / folder), "20", before=launcher)
            except AssertionError as error:
                # torch's own: a thread of a rank may outlive its group. The script goes on where it was, as users' do.
                if title == "train.py" or "terminate called without an active exception" not in str(error):
                    raise
                run_example(tmp_path / title, tmp_path, str(tmp_path / folder), "20", before=launcher)
    whole, in_two = (
        [json.loads(line) for line in (tmp_path / folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        for folder in ("whole", "in two")
    )
    assert [row["step"] for row in whole] == [*range(1, 21)]
    assert whole == in_two
    assert whole[-1]["val"] < whole[0]["loss"] - 1


def test_blocks_keep_their_lines():
    script = script_of("text\n```python\na = 1\n```\n```bash\nls\n```\n\n```python\nb = 2\n```\n")
    found = {number: line for number, line in enumerate(script.splitlines(), start=1) if line}
    assert found == {3: "a = 1", 10: "b = 2"}


def run_example(
    path: Path, folder: Path, *arguments: str, before: list[str] | None = None, seconds: int = SECONDS
) -> str:
    """What an example prints, and that it ends well."""
    run = subprocess.run(
        [sys.executable, *(before or ["-W", "error"]), str(path), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        timeout=seconds,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def run_here(name: str) -> None:
    """Does in this process what an example does as a script, so that it finds the ranks that are already there."""
    module = importlib.import_module(f"examples.{name}")
    source = ast.parse((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8"))
    guarded = [node.body for node in source.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    assert len(guarded) == 1, 'what runs stands below `if __name__ == "__main__":`'
    exec(compile(ast.Module(guarded[0], []), f"{name}.py", "exec"), module.__dict__)


def compare(name: str, printed: str) -> None:
    missing = [text for text in EXPECTED[name] if not re.search(text, printed, re.MULTILINE)]
    assert not missing, f"not in the output: {missing}\n{printed}"


EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


INTERNAL = {"test_my_reshard.py": {"fsharding.sharding.boxes"}}
"""A test of a reshard of one's own compares boxes, which have no public name."""


def test_examples_and_pages_import_public_names_only():
    scripts = {name: (ROOT / "examples" / name).read_text(encoding="utf-8") for name in EXAMPLES}
    scripts |= {name: script_of((DOCS / name).read_text(encoding="utf-8")) for name in PAGES}
    public = {f"fsharding.{name}" for name in fs.__all__} | {"fsharding"}
    public |= {"fsharding.testing", "fsharding.testing.strategies"}
    for name, script in scripts.items():
        imported = [node.module or "" for node in ast.walk(ast.parse(script)) if isinstance(node, ast.ImportFrom)]
        hidden = {module for module in imported if module.partition(".")[0] == "fsharding" and module not in public}
        assert hidden == INTERNAL.get(name, set()), name


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    run_here(name.removesuffix(".py"))
    compare(name, capsys.readouterr().out)


@full
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_a_script(name: str, tmp_path: Path):
    compare(name, run_example(ROOT / "examples" / name, tmp_path))


DRAWN = "muon_vs_adamw.py", "hessian_spectrum.py"


@full
@pytest.mark.parametrize("name", DRAWN)
def test_example_draws(name: str, tmp_path: Path):
    compare(name, run_example(ROOT / "examples" / name, tmp_path, "--plot", "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


ONE_AXIS = ["pp=2", "cp=2", *(pytest.param(f"{axis}=2", marks=full) for axis in ("dp", "ep", "replica"))]


@pytest.mark.parametrize("axes", ONE_AXIS)
def test_a_llama_is_finetuned_over_each_axis(
    axes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["finetune_llama.py", axes])
    run_here("finetune_llama")
    printed = capsys.readouterr().out
    assert f"mesh {{'{axes[:-2]}': 2}}: " in printed
    assert printed.endswith("fine-tuned on the mesh, and the same in transformers\n")


@full
@pytest.mark.parametrize("axes", ["replica=2 dp=2", "pp=2 cp=2", "pp=2 dp=2 tp=2"])
def test_a_llama_is_finetuned_over_any_mesh(axes: str, tmp_path: Path):
    printed = run_example(ROOT / "examples" / "finetune_llama.py", tmp_path, *axes.split())
    assert printed.endswith("fine-tuned on the mesh, and the same in transformers\n")
