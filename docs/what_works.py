"""Write contributing/what-works.md, and the table of features in Guarantees, from tests: `python docs/what_works.py`.

Each cell of a table is the id of a test. tests/unit/test_what_works_page.py checks that the pages are what this file
writes, and that each of these tests is collected by `make test` and never skipped. Without a test there is no mark.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "contributing" / "what-works.md"
GUARANTEES = Path(__file__).parent / "explanation" / "guarantees.md"
PAIR = "tests/dist/models/test_every_mesh.py::test_every_pair_of_axes_has_the_losses_of_one_process[{}]"
CELL = "tests/dist/train/test_what_works.py::test_a_feature_in_a_place[{}-{}]"
EVERY = "tests/dist/transforms/test_transforms.py::{}"
OPTIMIZER = "tests/dist/optim/test_optimizers.py::test_strategies_are_those_of_one_process[{}-zero013]"
PARTS = "tests/dist/optim/test_optimizers.py::test_dims_made_of_parts_are_updated_as_by_one_process[{}-tp]"
HUGGING_FACE = "tests/dist/interop/test_hf.py::test_a_model_of_transformers_goes_in_and_out[{}]"
SIGNAL = "tests/dist/mesh/test_preemption.py::test_one_rank_is_told_and_all_stop_after_the_same_step[{}]"
MODULE = "tests/dist/interop/test_functionalize.py::test_a_module_trains_as_on_one_process[layers.*]"
COMPILED = "tests/unit/train/test_step.py::test_compiled_blocks_have_the_losses_of_eager_ones[torch.float32-aot_eager]"

AXES = ["pp", "replica", "dp", "ep", "cp", "tp"]
PLACES = ["zero0", "zero1", "zero2", "zero3", "hsdp", "hfsdp", "tp", "cp", "ep", "pp"]


class Table(NamedTuple):
    """A table of the page: its text, the names of columns, and for each row the id of a test by column."""

    title: str
    text: str
    columns: list[str]
    rows: dict[str, dict[str, str]]


def pair(*axes: str) -> str:
    """The test of two axes, which runs every strategy on a mesh of four ranks."""
    return PAIR.format("-".join(sorted(axes, key=AXES.index)))


def strategies() -> Table:
    """Every strategy over every axis, with `dp` as the second axis, or `replica` if the strategy is a hybrid."""
    plain = {axis: pair("dp", axis if axis != "dp" else "tp") for axis in AXES}
    hybrid = {axis: pair("replica", axis if axis != "replica" else "dp") for axis in AXES}
    rows = {f"`zero({level})`": plain for level in range(4)} | {"`HSDP`": hybrid, "`HFSDP`": hybrid}
    text = (
        "Four ranks; losses and gradient norms equal one process's at 1e-5, and the bytes of each step equal the"
        " formula. Marks of `zero(0)` to `zero(3)` have `dp` as the second axis, marks of hybrids `replica`."
    )
    return Table("Strategies and axes", text, AXES, rows)


def axes() -> Table:
    """Every two axes."""
    rows = {f"`{one}`": {other: pair(one, other) for other in AXES if other != one} for one in AXES}
    text = "As above: each pair under `zero(0)` to `zero(3)`, with `replica` under `HSDP` and `HFSDP` too."
    return Table("Axes with each other", text, AXES, rows)


def features() -> Table:
    """Features of a step in every place: those of one test file, and what other tests show of others."""

    def everywhere(feature: str) -> dict[str, str]:
        return {place: CELL.format(place, feature) for place in PLACES}

    def optimizer(name: str) -> dict[str, str]:
        return {place: OPTIMIZER.format(name) for place in ("zero0", "zero1", "zero3")} | {"tp": PARTS.format(name)}

    through, over = "test_every_transform_through_every_strategy", "test_every_transform_over_the_axes_of_a_model"
    rows = {
        "microbatches": everywhere("microbatches"),
        "compute in bfloat16": everywhere("bfloat16"),
        "float16 and a loss scale": everywhere("float16_loss_scale"),
        "clipping by the global norm": everywhere("microbatches"),
        "remat: `nothing_saveable`": everywhere("remat"),
        "remat: `dots_saveable`": everywhere("dots_saveable"),
        "activations on the host": everywhere("offload"),
        "donation": everywhere("donation"),
        "frozen leaves": everywhere("frozen_leaves"),
        "save, load and continue": everywhere("checkpoint"),
        "reshard there and back": everywhere("reshard"),
        "export of its weights": everywhere("export"),
        "`fs.adamw`": everywhere("remat"),
        "`fs.optim.lion`": everywhere("lion"),
        "`fs.optim.muon`": everywhere("muon"),
        "`fs.optim.adafactor`": everywhere("adafactor"),
        "`fs.optim.from_torch`": optimizer("nadam"),
        "`fs.optim.ema`": optimizer("ema"),
        "`fs.optim.lookahead`": optimizer("lookahead"),
        "`fs.optim.multi_transform`": optimizer("groups"),
        "`torch.func` transforms": {
            **{f"zero{i}": EVERY.format(f"{through}[axes{i}-strategy{i}-policy{i}-names{i}]") for i in range(4)},
            "hsdp": EVERY.format(f"{through}[axes5-strategy5-policy5-names5]"),
            "tp": EVERY.format(f"{over}[axes0-gather-False-policy0-names0]"),
            "cp": EVERY.format(f"{over}[axes2-ring-False-policy2-names2]"),
            "ep": EVERY.format("test_every_transform_through_experts[axes0-policy0-names0]"),
        },
        "your own module: `functionalize`": {"zero1": MODULE, "zero3": MODULE},
        "Hugging Face, in and out": {
            "zero3": HUGGING_FACE.format("llama-zero3"),
            "tp": HUGGING_FACE.format("llama-tp"),
            "ep": HUGGING_FACE.format("mixtral-ep"),
            "pp": HUGGING_FACE.format("mixtral-pp"),
        },
        "stopped by a signal": {place: SIGNAL.format(place) for place in ("zero0", "zero3", "tp", "pp")},
        "`torch.compile` of blocks, on one rank": {"zero3": COMPILED},
    }
    text = (
        "Two ranks. `zero0` to `zero3` shard over `dp`, `hsdp` and `hfsdp` use `replica`, the others `zero(3)` over the"
        " axis of their name. Losses and norms equal one process's up to the rounding of the dtype, also after a save"
        " and a load or a reshard; frozen leaves and exported weights are equal in every bit. Rows from"
        " `fs.optim.from_torch` on have tests in other files."
    )
    return Table("Features", text, PLACES, rows)


TABLES = [strategies(), axes(), features()]


def tests() -> list[str]:
    """The id of every test that a mark names, in the order of the page."""
    return list(dict.fromkeys(cell for table in TABLES for row in table.rows.values() for cell in row.values()))


def render() -> str:
    """The page."""
    numbers = {test: number for number, test in enumerate(tests(), start=1)}
    lines = [
        "# What works with what",
        "",
        "A mark links to a test of the combination; without one, it may work or raise an error. `make test` runs all",
        "of them, on the CPU. Random larger combinations are in `tests/dist/models/test_mesh_laws.py` and",
        "`tests/property/laws/test_training_cases.py`. `python docs/what_works.py` writes this page.",
    ]
    for table in TABLES:
        lines += ["", f"## {table.title}", "", table.text, "", f"| | {' | '.join(table.columns)} |"]
        lines.append("|---" * (1 + len(table.columns)) + "|")
        for name, row in table.rows.items():
            cells = (f"[✓](#test-{numbers[row[column]]})" if column in row else "" for column in table.columns)
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "## Tests", "", "Run one with `pytest` and its id in quotes.", ""]
    lines += [f'{number}. <a id="test-{number}"></a>`{test}`' for test, number in numbers.items()]
    return "\n".join(lines) + "\n"


def rows_for_users() -> list[str]:
    """Rows of the table of features in Guarantees: features tested in the same places share one."""
    by_places: dict[tuple[str, ...], list[str]] = {}
    for name, row in features().rows.items():
        by_places.setdefault(tuple(place for place in PLACES if place in row), []).append(name)
    everywhere = "every strategy, `tp`, `cp`, `ep` and `pp`"
    return [
        f"| {'; '.join(names)} | {everywhere if places == tuple(PLACES) else ', '.join(places)} |"
        for places, names in by_places.items()
    ]


def render_for_users() -> str:
    """Guarantees with the rows of today."""
    head = "| feature | tested with |\n|---|---|\n"
    before, _, rest = GUARANTEES.read_text(encoding="utf-8").partition(head)
    return before + head + "\n".join(rows_for_users()) + "\n\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    GUARANTEES.write_text(render_for_users(), encoding="utf-8")
