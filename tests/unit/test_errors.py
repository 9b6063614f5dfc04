"""The exceptions and the one function that words them."""

import inspect

import pytest

from fsharding import errors
from fsharding.errors import FshardingError, listed, message, printable


def test_a_message_has_rule_rows_and_mend():
    assert message("fs.f", "cannot do it.") == "fs.f cannot do it."
    assert message("fs.f", "cannot do it.", ["a: 1", "b: 2"]) == "fs.f cannot do it.\n  a: 1\n  b: 2"
    assert message("fs.f", "cannot do it.", mend="Do not.") == "fs.f cannot do it.\nDo not."
    assert message("fs.f", "cannot do it.", (r for r in ["a"]), "Do not.") == "fs.f cannot do it.\n  a\nDo not."


def test_ten_rows_and_how_many_more():
    text = message("fs.f", "cannot do it.", (f"row {i}" for i in range(12_345)), "Do not.")
    assert text.splitlines() == [
        "fs.f cannot do it.",
        *(f"  row {i}" for i in range(10)),
        "  and 12,335 more",
        "Do not.",
    ]
    assert message("fs.f", "cannot.", ["a"] * 10).count("\n  a") == 10
    assert listed("abc") == "a, b, c" and listed([]) == "none" and listed([], none="nothing") == "nothing"
    assert listed(map(str, range(1_000))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 990 more"


def test_long_names_keep_their_ends():
    tail = " is float32[3]; wanted is float32[4]"
    text = message("fs.f", "cannot do it.", ["a" * 10**6 + tail], "x" * 10**6)
    assert len(text) < 3_000
    assert f"\n  {'a' * 400} ... {'a' * 20}" in text
    assert f"aa{tail} ({10**6 + len(tail):,} characters)\n" in text


def test_nothing_that_a_terminal_acts_on():
    evil = "\x1b]0;owned\x07\x9b31m\r\u202ename\udc80\u2028 é 名"
    want = r"\x1b]0;owned\x07\x9b31m\r\u202ename\udc80\u2028 é 名"
    assert printable(evil) == want and printable("a b é") == "a b é" and printable("a\nb\tc") == r"a\nb\tc"
    text = message(f"fs.f{evil}", f"cannot read {evil}.", [evil], f"Do not: {evil}.")
    assert text == f"fs.f{want} cannot read {want}.\n  {want}\nDo not: {want}."
    text.encode()


def test_no_row_can_look_like_another_one():
    assert message("fs.f", "cannot.", ["a\nb\n  c: fine", "d"]) == "fs.f cannot.\n  a\n    b\n      c: fine\n  d"
    long = message("fs.f", "cannot.", ["\n".join(map(str, range(1_000)))])
    assert long.splitlines()[-2:] == ["    39", "    ... and 960 more lines"]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("MeshError", ValueError), ("SpecError", ValueError), ("LayoutError", ValueError), ("TreeError", ValueError),
        ("BatchError", ValueError), ("RandomKeyError", ValueError), ("DataError", ValueError), ("ConfigError", ValueError),
        ("CheckpointError", ValueError), ("TransformError", TypeError), ("DonatedError", RuntimeError),
        ("NonFiniteError", FloatingPointError), ("RankError", RuntimeError), ("ScheduleError", ValueError),
    ],
)  # fmt: skip
def test_what_a_user_can_mend_is_a_value_error(name, family):
    kind = getattr(errors, name)
    assert issubclass(kind, FshardingError) and issubclass(kind, family)
    with pytest.raises(family, match=r"^text$"):
        raise kind("text")


def test_all_exceptions_are_public_and_documented():
    kinds = {name for name, x in vars(errors).items() if inspect.isclass(x) and issubclass(x, Exception)}
    assert kinds | {"did_you_mean", "message", "listed", "printable"} == set(errors.__all__)
    assert all(inspect.getdoc(getattr(errors, name)) for name in errors.__all__)
