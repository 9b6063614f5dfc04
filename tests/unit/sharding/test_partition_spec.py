"""`P` and `AxisRules`: equal when they mean the same, refused when they cannot be."""

import functools
import pickle

from hypothesis import given
from hypothesis import strategies as st

import fsharding as fs
from fsharding.base.errors import SpecError
from fsharding.mesh.abstract_mesh import AXES
from fsharding.sharding.partition_spec import DEFAULT_RULES, AxisRules, P
from tests import helpers

KNOWN = "Axes are pp, replica, dp, ep, cp, tp."


@st.composite
def entries(draw):
    found: list[list[str]] = [[] for _ in range(draw(st.integers(0, 4)))]
    for axis in draw(st.permutations(AXES)):
        if found and draw(st.booleans()):
            found[draw(st.integers(0, len(found) - 1))].append(axis)
    return found


@given(entries())
def test_a_spec_is_its_axes_by_dim(cuts):
    spec = P(*(tuple(cut) for cut in cuts))
    assert [spec.axes(dim) for dim in range(len(cuts))] == [tuple(cut) for cut in cuts]
    assert spec.axes(99) == ()
    assert spec.all_axes == tuple(axis for cut in cuts for axis in cut)
    assert spec == P(*(tuple(cut) for cut in cuts), None, None) and hash(spec) == hash(P(*spec, None))
    assert spec == P(*(cut[0] if len(cut) == 1 else tuple(cut) or None for cut in cuts))
    assert pickle.loads(pickle.dumps(spec)) == spec == eval(repr(spec), {"P": P})
    if cuts:
        assert spec.drop(0) == P(*(tuple(cut) for cut in cuts[1:]))
        assert spec.replace(0, ()) == P(None, *(tuple(cut) for cut in cuts[1:]))
        assert spec.replace(len(cuts), ()) == spec


def test_entries_that_are_no_axes():
    mend = "Pass an axis such as 'dp', a tuple of axes, or None."
    assert refusal(lambda: P("dp", 0)) == f"fs.P got 0 for a dim.\n{mend}"
    assert refusal(lambda: P(("dp", None))) == f"fs.P got ('dp', None) for a dim.\n{mend}"
    assert refusal(lambda: AxisRules(mlp="tp", embed=3)) == f"fs.AxisRules got embed=3.\n{mend}"


def test_texts_of_specs():
    assert repr(P("dp", None, ("tp", "cp"))) == "P('dp', None, ('tp', 'cp'))"
    assert repr(P()) == repr(P(None)) == "P()"
    assert isinstance(P("dp").replace(1, ("tp",)), fs.P)


refusal = functools.partial(helpers.refusal, kind=SpecError)


def test_specs_that_cannot_be():
    assert (
        refusal(lambda: P("dp", ("tp", "dp")))
        == "P('dp', ('tp', 'dp')) uses dp twice.\nAn axis shards at most one dim."
    )
    assert refusal(lambda: P(("cp", "cp"), "tp", "tp")) == (
        "P(('cp', 'cp'), 'tp', 'tp') uses cp, tp twice.\nAn axis shards at most one dim."
    )
    assert refusal(lambda: P("dp", "tpp")) == f"fs.P got an unknown axis 'tpp'. {KNOWN} Did you mean 'tp'?"
    assert (
        refusal(lambda: P("dp").replace(1, ("dp",)))
        == "P(('dp',), ('dp',)) uses dp twice.\nAn axis shards at most one dim."
    )


def test_rules_are_a_hashable_mapping():
    rules = AxisRules(layers="pp", embed=("dp", "cp"), norm=None)
    assert dict(rules) == {"layers": ("pp",), "embed": ("dp", "cp"), "norm": ()}
    assert rules == AxisRules(norm=None, embed=("dp", "cp"), layers=("pp",))
    assert hash(rules) == hash(AxisRules(norm=None, embed=("dp", "cp"), layers=("pp",)))
    assert rules != AxisRules(layers="pp") and rules != {"layers": ("pp",)}
    assert rules.replace(embed="tp", more="ep")["embed"] == ("tp",) and rules["embed"] == ("dp", "cp")
    assert pickle.loads(pickle.dumps(rules)) == rules
    assert repr(rules) == "AxisRules(layers=('pp',), embed=('dp', 'cp'), norm=())"
    assert eval(repr(rules), {"AxisRules": AxisRules}) == rules


def test_default_rules_keep_tensor_and_data_axes_apart():
    for name, axes in DEFAULT_RULES.items():
        assert not ("tp" in axes and "dp" in axes), name
    assert DEFAULT_RULES["layers"] == ("pp",) and DEFAULT_RULES["expert"] == ("ep",)


def test_rules_that_cannot_be():
    assert refusal(lambda: AxisRules(embed=("dp", "ttp"))) == (
        f"AxisRules(embed=('dp', 'ttp')) got an unknown axis 'ttp'. {KNOWN} Did you mean 'tp'?"
    )
    assert refusal(lambda: DEFAULT_RULES.replace(mlp="mp")).startswith("AxisRules(mlp='mp') got an unknown axis 'mp'.")


def test_hints_for_dim_names():
    assert DEFAULT_RULES.hint("emebd") == (
        "Add emebd=None to the AxisRules, or the axes that shard it. Did you mean 'embed'?"
    )
    assert DEFAULT_RULES.hint("zzz") == "Add zzz=None to the AxisRules, or the axes that shard it."
