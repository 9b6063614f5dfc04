"""Links and commands of the pages, of README and of CONTRIBUTING lead to what is there and are taken by the command line.

`make docs` checks links between pages too; README and CONTRIBUTING are no pages of it, and nothing else reads commands.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import tyro
import yaml

from bench.__main__ import main as bench
from fsharding.apps.cli import main as command_line

ROOT = Path(__file__).resolve().parents[2]
PAGES = [path for folder in ("", "bench", "contributing", "findings") for path in sorted((ROOT / folder).glob("*.md"))]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
LAUNCH = sorted((ROOT / "examples" / "launch").iterdir())
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def anchors(path):
    """The ids of a page: of its headings, as GitHub and mkdocs make them, and those that are written out."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in words} | set(re.findall(r'id="([\w-]+)"', text))


def offences_of_links(path):
    found = []
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            found.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(there):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_to_something(path):
    assert not offences_of_links(path)


def test_the_rule_of_links_catches(tmp_path):
    (tmp_path / "b.md").write_text("# One two\n")
    (tmp_path / "a.md").write_text("[x](b.md#one-two) [y](b.md#three) [z](c.md) `[code](d.md)`\n```\n[n](e.md)\n```\n")
    assert offences_of_links(tmp_path / "a.md") == ["b.md#three: no such heading", "c.md: no such file"]


# ------------------------------------------------------------------------------------------------------------ commands
def words_of_pods(text):
    """The command of each container of a manifest."""
    for part in yaml.safe_load_all(text):
        spec = part["spec"]
        templates = [spec.get("template"), *(r["template"] for r in spec.get("pytorchReplicaSpecs", {}).values())]
        for template in filter(None, templates):
            yield from ([*c["command"], *c["args"]] for c in template["spec"]["containers"])


def commands(path):
    """The arguments of each call of `fsharding` or `python -m bench` in the blocks of a page, a script or a manifest."""
    text = path.read_text(encoding="utf-8")
    kinds = {".sh": "bash", ".yaml": "yaml"}
    for kind, block in FENCE.findall(text) if path.suffix == ".md" else [(kinds[path.suffix], text)]:
        if kind == "yaml":
            lines = list(words_of_pods(block))
        elif kind == "bash":
            lines = [shlex.split(line, comments=True) for line in re.sub(r"\\\n", " ", block).splitlines()]
        else:
            continue
        for words in lines:
            if "fsharding" in words and (words[0] in ("fsharding", "srun") or "-m" in words or "=" in words[0]):
                yield words[words.index("fsharding") + 1 :]
            elif words[1:3] == ["-m", "bench"]:
                yield words[2:]


COMMANDS = [(name_of(path), " ".join(words)) for path in (*PAGES, *LAUNCH) for words in commands(path)]


@pytest.mark.parametrize(("page", "line"), dict.fromkeys(COMMANDS), ids=lambda value: value)
def test_the_command_line_takes_what_pages_show(page, line, monkeypatch, tmp_path):
    """Arguments are read and nothing is done: `tyro.cli` is asked for the configuration alone."""
    read = tyro.cli
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.partition(" > ")[0])
    if "--config" in words:  # a file that another line of the page has printed
        (tmp_path / words[words.index("--config") + 1]).write_text("out: runs/printed\n")

    def stop(*args, **kwargs):
        raise EOFError(read(*args, **kwargs))

    monkeypatch.setattr(command_line.tyro, "cli", stop)
    if "--help" in line or line.endswith("..."):
        return
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            with pytest.raises(EOFError):
                bench(words[1:]) if words[0] == "bench" else command_line.main(words)
        except SystemExit as end:
            raise AssertionError(output.getvalue()) from end


def test_pages_show_commands_of_every_kind():
    verbs = {line.split()[0] for _, line in COMMANDS}
    assert verbs >= {"train", "plan", "inspect", "reshard", "export", "bench", "doctor"}
    launched = {page for page, line in COMMANDS if "--resume auto" in line}
    assert launched >= {f"examples/launch/{name}" for name in ("slurm.sh", "pytorchjob.yaml", "job.yaml")}
    kinds = [part["kind"] for path in LAUNCH if path.suffix == ".yaml" for part in yaml.safe_load_all(path.read_text())]
    assert kinds == ["Service", "Job", "PyTorchJob"]


def test_the_page_of_extras_names_all_of_them():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.M)
    page = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    assert sorted(extras) == sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
