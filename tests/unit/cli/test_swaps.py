"""The option --swap-at as text."""

import pytest

from fsharding.apps.cli.config import Swap, parse_swaps
from fsharding.base.errors import ConfigError


def test_swaps_are_read_in_any_order():
    assert parse_swaps("") == ()
    assert parse_swaps("100=zero3:replica=2,dp=2,50=zero1") == (
        Swap(50, "zero1", ""),
        Swap(100, "zero3", "replica=2,dp=2"),
    )


@pytest.mark.parametrize("text", ["zero1", "50", "50=zero9", "0=zero1", "-1=zero1", "a=zero1", "dp=2", "5=zero1,dp=2"])
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError, match=r"cannot read .* in --swap-at") as caught:
        parse_swaps(text)
    assert str(caught.value).endswith("nvfp4.") and "Write STEP=STRATEGY or STEP=STRATEGY:dp=4" in str(caught.value)


def test_a_swap_may_change_the_precision():
    assert parse_swaps("80=bf16,90=mxfp8:dp=4") == (Swap(80, "", "", "bfloat16"), Swap(90, "", "dp=4", "mxfp8"))


def test_a_step_stands_once():
    with pytest.raises(ConfigError, match="step 5 occurs twice"):
        parse_swaps("5=zero1,5=zero2")
