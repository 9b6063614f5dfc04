"""Every public function and class has an example in its docstring. All of them run on one rank, and on two."""

import doctest

import pytest

from fsharding.testing import RankPool
from tests.doc_examples import PUBLIC, example_of, failures, failures_on_a_rank
from tests.helpers import slow

ALONE = {
    **dict.fromkeys(["fs.run_ranks", "fs.testing.RankPool", "fs.testing.RankFailure"], "start ranks"),
    "fs.foreign.export": "writes in one process",
    **dict.fromkeys(
        ["fs.checkpoint.reshard_checkpoint", "fs.checkpoint.inspect"], "write or remove files in one process"
    ),
}
"""Examples that run in one process, with the reason."""


@pytest.mark.parametrize("name", PUBLIC)
def test_example(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert example_of(name).examples, f"{name} has no example"
    assert not (report := failures(name)), report


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as ranks:
        yield ranks


@slow
@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ALONE])
def test_example_on_two_ranks(name, pool, tmp_path):
    reports = pool.run(failures_on_a_rank, name, str(tmp_path))
    assert not any(reports), "\n".join(f"rank {rank}:\n{report}" for rank, report in enumerate(reports) if report)


def test_what_runs_alone_is_public():
    assert set(ALONE) <= set(PUBLIC)


def test_output_of_rank_0_is_compared_on_rank_0(monkeypatch):
    parser = doctest.DocTestParser()
    text = ">>> fs.own  # on rank 0\n'rank 0'\n>>> 1\n2\n"
    monkeypatch.setattr(
        "tests.doc_examples.example_of",
        lambda name: parser.get_doctest(text, {"fs": type("", (), {"own": name})}, name, None, None),
    )
    assert failures("rank 0", 0).count("Failed example") == 1
    assert failures("rank 1", 1).count("Failed example") == 1
    assert failures("rank 1", 0).count("Failed example") == 2
