"""Every feature of a train step in every place: losses and norms are those of one process without ranks.

The ids, [place-feature], are what contributing/what-works.md names: a mark of its table is one case here.
"""

import functools
from dataclasses import replace

import pytest

from fsharding.testing import assert_bitwise_equal, assert_trees_close, run_ranks
from tests.features import BASE, FEATURES, PLACES, check_export, train


def losses(case, feature, folder):
    return train(case, feature, folder)[0]


@functools.cache
def alone(config, feature):
    how = {name: value for name, value in feature.how if name == "precision"}
    one = replace(BASE, config=config, **how)
    return losses(one, replace(feature, half=""), "")


CASES = [pytest.param(place, feature, id=f"{place}-{feature}") for place in PLACES for feature in FEATURES]


@pytest.mark.parametrize(("place", "feature"), CASES)
def test_a_feature_in_a_place(place, feature, tmp_path):
    what = FEATURES[feature]
    case = replace(PLACES[place], **dict(what.how))
    runs = run_ranks(losses, 2, case, what, str(tmp_path / "ckpt"))
    assert_bitwise_equal(runs[0], runs[1], "the ranks' results")
    want = alone(case.config, what)
    assert want[:, 1].max() > 0.5, "the clip must clip"
    assert_trees_close(runs[0], want, rtol=what.tolerance, atol=what.tolerance, what="losses and norms")
    if what.half == "export":
        check_export(case, tmp_path / "ckpt")
