"""Tables and lines of progress of benchmarks fit into a terminal of 80 columns, and lose nothing."""

import json

from bench.rounds import WIDTH, print_rows, say

COLUMNS = {
    name: (lambda row, name=name: f"{row[name]:.1f}")
    for name in ("median ms", "iqr ms", "to fsdp2", "floor ms", "peak MiB")
}


def shown(capsys, columns, rows):
    print_rows("a title", columns, rows, as_json=False)
    return capsys.readouterr().out.splitlines()


def test_columns_that_do_not_fit_are_in_a_second_table_with_the_names(capsys):
    rows = [
        {"contender": f"fsharding-zero{i}, every byte sent", **dict.fromkeys(COLUMNS, 1234.5 + i)} for i in range(2)
    ]
    lines = shown(capsys, {"contender": lambda row: row["contender"], **COLUMNS}, rows)
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert text.count("fsharding-zero0, every byte sent") == 2 and text.count("1234.5") == len(COLUMNS)
    assert all(text.count(name) == 1 for name in COLUMNS)


def test_what_fits_is_one_table(capsys):
    lines = shown(capsys, {"call": lambda row: row["call"], "s": lambda row: "1"}, [{"call": "save"}])
    assert sum("save" in line for line in lines) == 1


def test_a_cell_that_is_wider_than_a_terminal_stays_whole(capsys):
    lines = shown(capsys, {"call": lambda row: row["call"], "s": lambda row: "1"}, [{"call": "x" * 100}])
    assert any("x" * 100 in line for line in lines)


def test_rows_in_json_have_everything(capsys):
    print_rows("a title", {}, [{"call": "save", "s": 1.0}], as_json=True)
    assert json.loads(capsys.readouterr().out)["rows"] == [{"call": "save", "s": 1.0}]


def test_long_lines_of_progress_go_on_in_the_next_line(capsys):
    say(", ".join(f"fsharding-zero{i}, every byte sent" for i in range(4)) + ": 2 rounds to warm up, then 9")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= WIDTH and " ".join(line.strip() for line in lines).endswith("9")
