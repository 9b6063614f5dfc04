"""The exceptions, the form of their texts, and the public names that these begin with."""

import gc
import inspect
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from types import FunctionType

import pytest
import torch

import fsharding as fs
from fsharding import errors
from fsharding.base.calls import call_as, call_of, path_of, public_name
from fsharding.base.errors import FshardingError, listed, message, printable, report
from fsharding.base.public import public
from fsharding.base.registry import names_of


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


@public
def outer(inner):
    return [message("cannot do it."), inner()]


@public
def makes():
    @public
    def made():
        return message("cannot do it.", ["a: 1"])

    return made


def test_an_error_begins_with_the_name_of_the_innermost_public_call():
    assert message("cannot do it.") == "fsharding cannot do it."
    assert outer(public_name) == ["outer cannot do it.", "outer"]
    assert outer(makes())[1] == "makes cannot do it.\n  a: 1", "a function made in a public call has its name"
    assert outer(lambda: call_as("a b --c", message, "cannot."))[1] == "a b --c cannot."
    assert call_as("a", outer, public_name) == ["outer cannot do it.", "outer"]
    assert call_as("a", lambda: [outer(public_name), public_name()])[1] == "a"


def test_names_are_the_paths_at_which_fs_has_functions_and_classes():
    paths = {
        "fs.adamw": fs.adamw,
        "fs.optim.clip_by_global_norm": fs.optim.clip_by_global_norm,
        "fs.Precision": fs.Precision.__post_init__,
        "fs.Layout.with_mesh": fs.Layout.with_mesh,
        "fs.checkpoint.Checkpointer.save": fs.checkpoint.Checkpointer.save,
        "fs.testing.RankPool": fs.testing.RankPool.__init__,
        "train step": type(fs.make_train_step(lambda params, batch: 0, fs.sgd(0.1))).__call__,
    }
    assert {path: path_of(fn) for path, fn in paths.items()} == {path: path for path in paths}
    with pytest.raises(errors.TreeError, match=r"^fs\.adamw got "):
        fs.adamw(1e-3).update({"b": torch.ones(1)}, fs.adamw(1e-3).init({"w": torch.ones(1)}))


def test_every_public_function_has_a_path():
    """A mark on a function that `fs` does not have would begin errors with a name that no one can type."""
    values = ("train step", "captured step", "pure module", "te module", "PureModule.init", "PureModule.state_dict")
    found = {path_of(x) for x in gc.get_objects() if type(x) is FunctionType and _is_marked(x)}
    registered = {*names_of("optimizer")}
    assert len(found) > 150
    assert not {path for path in found if not path.startswith("fs.")} - {*values} - registered


def _is_marked(fn):
    ours = str(fn.__module__).startswith("fsharding.") and fn.__code__ is outer.__code__
    return ours and "<locals>" not in fn.__qualname__


def test_a_call_that_failed_is_over_and_each_thread_has_its_own():
    with pytest.raises(ZeroDivisionError):
        outer(lambda: 1 / 0)
    assert public_name() == "fsharding"
    with ThreadPoolExecutor(1) as pool:
        assert outer(lambda: pool.submit(public_name).result())[1] == "fsharding"
        assert outer(lambda: pool.submit(call_of, get_ident()).result())[1] == "outer"


def test_a_compiled_function_has_public_ones_in_its_graph():
    @public
    def double(x):
        return 2 * x

    explained = torch._dynamo.explain(lambda x: double(x) + 1)(torch.ones(2))
    assert explained.graph_count == 1 and explained.graph_break_count == 0


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
