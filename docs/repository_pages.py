"""Give files of the repository a page: examples with their code, and Markdown files.

A page links to an example as a reader of the repository would, `../../examples/mlp.py`; on the site the same link leads
to the page of the example. So a link is right in both places, and `--strict` refuses one that leads to nothing.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE_LINK = re.compile(r"\]\(\.\./((?:\.\./)*)examples/(\w+)\.py\)")
MAINTAINERS = {
    "design": "Decisions",
    "runtime": "Runtime and pipeline executor",
    "sharding": "Sharding algebra",
    "checkpoint-format": "Checkpoint format",
    "facts": "Measured facts",
    "guarantees": "Tests of guarantees",
    "errors": "Error messages that explain themselves",
    "what-works": "What works with what",
}
"""Pages of contributing/ with their titles; a file without an entry fails the build."""
MARKDOWN = {"CONTRIBUTING.md": "contributing.md", "bench/benchmarks.md": "benchmarks.md"}
MARKDOWN |= {f"contributing/{name}.md": f"contributing/{name}.md" for name in MAINTAINERS}
"""Pages of the site by the Markdown files that they are made of."""
MARKDOWN_LINK = re.compile(rf"\]\(\.\./((?:\.\./)*)({'|'.join(map(re.escape, MARKDOWN))})(#[\w-]+)?\)")

GALLERY = {
    "Train a model": {
        "mlp": "An MLP with a hand-written loss",
        "own_module": "Your own torch module",
        "nanogpt": "A GPT of your own on bytes",
        "pretrain": "Pretrain GPT-2",
        "offload": "A state that does not fit, on disk",
        "batch_norm": "A convolutional net with batch norms",
        "diffusion": "A diffusion model",
        "research_step": "A train step by hand, under three strategies",
    },
    "Fine-tune": {
        "finetune_llama": "A Llama of transformers, on any mesh",
        "finetune_lora": "LoRA adapters of a Hugging Face model",
        "lora": "LoRA adapters on a frozen decoder",
    },
    "Optimizers": {
        "adopt": "An optimizer from its paper (ADOPT)",
        "muon_vs_adamw": "Muon against AdamW",
        "sam": "Sharpness-aware minimization",
        "ema_eval": "Evaluate a moving average of parameters",
    },
    "Gradients of other kinds": {
        "dp_sgd": "Differentially private SGD: per-sample gradients",
        "ensemble": "An ensemble by vmap",
        "maml": "Meta-learning: gradients of gradients",
        "hessian_spectrum": "Eigenvalues of a Hessian",
    },
    "Test": {"test_my_reshard": "Property-based tests of a reshard"},
}
"""Examples by task, with the title of each; a file without an entry fails the build."""


def on_config(config: Any) -> Any:
    """Adds the examples to the navigation, before the reference, and the pages for maintainers at its end."""
    pages: list[Any] = [{"All examples": "examples/index.md"}]
    pages += [
        {task: [{title: f"examples/{name}.md"} for name, title in titles.items()]} for task, titles in GALLERY.items()
    ]
    at = next(i for i, part in enumerate(config["nav"]) if "Reference" in part)
    maintainers = [{title: f"contributing/{name}.md"} for name, title in MAINTAINERS.items()]
    last = {"Contributing": [{"How to contribute": "contributing.md"}, *maintainers]}
    config["nav"] = [*config["nav"][:at], {"Examples": pages}, *config["nav"][at:], last]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Makes the pages."""
    found = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
    titles = {name: title for group in GALLERY.values() for name, title in group.items()}
    if found.keys() != titles.keys():
        raise ValueError(f"GALLERY and examples/ differ: {sorted(found.keys() ^ titles.keys())}")
    for name, path in found.items():
        files.append(File.generated(config, f"examples/{name}.md", content=page_of(path, titles[name])))
    files.append(File.generated(config, "examples/index.md", content=gallery(found)))
    if (written := {path.stem for path in (ROOT / "contributing").glob("*.md")}) != {*MAINTAINERS}:
        raise ValueError(f"MAINTAINERS and contributing/ differ: {sorted(written ^ {*MAINTAINERS})}")
    for source, page in MARKDOWN.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = text.replace("](../docs/", "](../" if "/" in page else "](")
        text = text.replace("](docs/", "](").replace("](../bench/", "](../")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to files of the repository into links to their pages."""
    text = EXAMPLE_LINK.sub(r"](\1examples/\2.md)", markdown)
    return MARKDOWN_LINK.sub(lambda m: f"]({m[1]}{MARKDOWN[m[2]]}{m[3] or ''})", text)


def gallery(found: dict[str, Path]) -> str:
    """Write the page of all examples by task: title, and what the example does."""
    lines = ["# Examples", "", "All run on the CPU; each page says how."]
    for task, titles in GALLERY.items():
        lines += ["", f"## {task}", "", "| example | what it does |", "|---|---|"]
        lines += [f"| [{title}]({name}.md) | {summary(found[name])} |" for name, title in titles.items()]
    return "\n".join(lines) + "\n"


def summary(path: Path) -> str:
    """Return the first paragraph of an example's docstring."""
    text = docstring_of(path.read_text(encoding="utf-8"))
    return text.partition("\n\n")[0].replace("\n", " ")


def page_of(path: Path, title: str) -> str:
    """Write the docstring of an example as text, and all of the file as code."""
    source = path.read_text(encoding="utf-8")
    return f'# {title}\n\n{docstring_of(source)}\n\n```python title="examples/{path.name}"\n{source}```\n'


def docstring_of(source: str) -> str:
    """Return the docstring of a module."""
    return ast.get_docstring(ast.parse(source)) or ""
