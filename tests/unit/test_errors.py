"""The exceptions, the form of their texts, and the public names that these begin with."""

import inspect

import pytest
import torch

from fsharding import errors
from fsharding.base.calls import call_as, name_of, named, public_name
from fsharding.base.errors import FshardingError, listed, message, printable, report


def test_a_message_has_rule_rows_and_mend():
    assert report("fs.f cannot do it.") == "fs.f cannot do it."
    assert report("fs.f cannot do it.", ["a: 1", "b: 2"]) == "fs.f cannot do it.\n  a: 1\n  b: 2"
    assert report("fs.f cannot do it.", mend="Do not.") == "fs.f cannot do it.\nDo not."
    assert report("fs.f cannot do it.", (r for r in ["a"]), "Do not.") == "fs.f cannot do it.\n  a\nDo not."


def test_ten_rows_and_how_many_more():
    text = report("fs.f cannot do it.", (f"row {i}" for i in range(12_345)), "Do not.")
    assert text.splitlines() == [
        "fs.f cannot do it.",
        *(f"  row {i}" for i in range(10)),
        "  and 12,335 more",
        "Do not.",
    ]
    assert report("fs.f cannot.", ["a"] * 10).count("\n  a") == 10
    assert listed("abc") == "a, b, c" and listed([]) == "none" and listed([], none="nothing") == "nothing"
    assert listed(map(str, range(1_000))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 990 more"


def test_long_names_keep_their_ends():
    tail = " is float32[3]; wanted is float32[4]"
    text = report("fs.f cannot do it.", ["a" * 10**6 + tail], "x" * 10**6)
    assert len(text) < 3_000
    assert f"\n  {'a' * 400} ... {'a' * 20}" in text
    assert f"aa{tail} ({10**6 + len(tail):,} characters)\n" in text


def test_nothing_that_a_terminal_acts_on():
    evil = "\x1b]0;owned\x07\x9b31m\r\u202ename\udc80\u2028 é 名"
    want = r"\x1b]0;owned\x07\x9b31m\r\u202ename\udc80\u2028 é 名"
    assert printable(evil) == want and printable("a b é") == "a b é" and printable("a\nb\tc") == r"a\nb\tc"
    text = report(f"fs.f{evil} cannot read {evil}.", [evil], f"Do not: {evil}.")
    assert text == f"fs.f{want} cannot read {want}.\n  {want}\nDo not: {want}."
    text.encode()


def test_no_row_can_look_like_another_one():
    assert report("fs.f cannot.", ["a\nb\n  c: fine", "d"]) == "fs.f cannot.\n  a\n    b\n      c: fine\n  d"
    long = report("fs.f cannot.", ["\n".join(map(str, range(1_000)))])
    assert long.splitlines()[-2:] == ["    39", "    ... and 960 more lines"]


@named("fs.outer")
def outer(inner):
    return [message("cannot do it."), inner()]


@named("fs.f(...).inner")
def inner():
    def helper():
        return message("cannot do it.", ["a: 1"])

    return helper()


def test_an_error_begins_with_the_name_of_the_innermost_public_call():
    assert message("cannot do it.") == "fsharding cannot do it."
    assert outer(inner) == ["fs.outer cannot do it.", "fs.f cannot do it.\n  a: 1"]
    assert outer(lambda: call_as("a b --c", message, "cannot."))[1] == "a b --c cannot."
    assert call_as("a", outer, lambda: public_name()) == ["fs.outer cannot do it.", "fs.outer"]
    assert name_of(outer.__code__) == "fs.outer" and name_of(test_no_row_can_look_like_another_one.__code__) == ""


def test_a_name_is_found_in_a_generator_and_in_a_backward_that_is_marked():
    @named("fs.rows")
    def rows():
        yield message("cannot.")

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @named("fs.twice")
        def backward(ctx, grad):
            raise FshardingError(message("has no gradient."))

    assert outer(lambda: next(rows()))[1] == "fs.rows cannot."
    y = Twice.apply(torch.ones((), requires_grad=True))
    with pytest.raises(FshardingError, match=r"^fs\.twice has no gradient\.$"):
        y.backward()


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
    assert kinds | {"did_you_mean", "message", "report", "listed", "printable"} == set(errors.__all__)
    assert all(inspect.getdoc(getattr(errors, name)) for name in errors.__all__)
