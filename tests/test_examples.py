"""What the documentation shows runs: the python blocks of its pages, and every file in examples/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"tour.md": 20, "testing.md": 3}  # and the number of asserts that each has at least
SECONDS = 100

# What each example prints at its end, and what has to be in its output besides.
EXPECTED: dict[str, list[str]] = {
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
    "research_step.py": [
        r"^zero\(0\) on 2 ranks$",
        r"^  step 4  loss \d\.\d{6} .* gathers 0  reductions 6  units alive 0$",
        r"^zero\(3\) on 2 ranks$",
        r"^  step 4  loss \d\.\d{6} .* gathers 10  reductions 6  units alive 2$",
        r"^  params\.blocks\.wq is float32\[4, 64, 64@dp\], here \[4, 64, 32\]$",
        "equal in every bit$",
    ],
    "test_my_reshard.py": [r"^25 random cases went there and back, equal in every bit$"],
}


def script_of(markdown: str) -> str:
    """The python blocks of a page as one script, each line where it stands on the page."""
    lines = [""] * (markdown.count("\n") + 1)
    for block in re.finditer(r"^```python\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL):
        code = block[1].splitlines()
        first = markdown.count("\n", 0, block.start(1))
        lines[first : first + len(code)] = code
    return "\n".join(lines)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_runs(name: str):
    page = ROOT / "docs" / name
    script = script_of(page.read_text(encoding="utf-8"))
    assert script.count("assert") > PAGES[name]
    exec(compile(script, str(page), "exec"), {"__name__": "__main__"})


def test_blocks_keep_their_lines():
    script = script_of("text\n```python\na = 1\n```\n```bash\nls\n```\n\n```python\nb = 2\n```\n")
    found = {number: line for number, line in enumerate(script.splitlines(), start=1) if line}
    assert found == {3: "a = 1", 10: "b = 2"}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_runs(path: Path, tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        timeout=SECONDS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    missing = [text for text in EXPECTED[path.name] if not re.search(text, run.stdout, re.MULTILINE)]
    assert not missing, f"not in the output: {missing}\n{run.stdout}"
