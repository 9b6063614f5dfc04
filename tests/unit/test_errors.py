"""The exceptions and the one function that words them."""

import inspect

import pytest

from fsharding import errors
from fsharding.errors import FshardingError, message


def test_a_message_has_rule_rows_and_mend():
    assert message("fs.f", "cannot do it.") == "fs.f cannot do it."
    assert message("fs.f", "cannot do it.", ["a: 1", "b: 2"]) == "fs.f cannot do it.\n  a: 1\n  b: 2"
    assert message("fs.f", "cannot do it.", mend="Do not.") == "fs.f cannot do it.\nDo not."
    assert message("fs.f", "cannot do it.", (r for r in ["a"]), "Do not.") == "fs.f cannot do it.\n  a\nDo not."


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
    assert kinds | {"message"} == set(errors.__all__)
    assert all(inspect.getdoc(getattr(errors, name)) for name in errors.__all__)
