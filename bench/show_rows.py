"""Prints the rows of one `python -m bench --json` object as a table: `python -m bench.show_rows FILE`."""

import json
import sys
from pathlib import Path

from bench.rounds import print_rows

SKIP = ("compiled", "dtype", "ranks")


def main(path: Path) -> None:
    """Reads the last line of a file, which is the object."""
    rows = json.loads(path.read_text().strip().splitlines()[-1])["rows"]
    columns = {name: lambda row, name=name: shown(row[name]) for name in rows[0] if name not in SKIP}
    print_rows(path.stem, columns, rows, as_json=False)


def shown(value: object) -> str:
    """A number in few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


main(Path(sys.argv[1]))
