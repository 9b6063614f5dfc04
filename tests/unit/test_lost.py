"""Whom blame leads to."""

from fsharding.lost import follow


def followed(peers, notes, me=0):
    return follow(peers, me, notes.get)


def test_blame_goes_on_to_those_who_are_silent():
    notes = {1: {"peers": [2]}, 2: {"peers": [1, 3]}, 4: {"peers": [5]}}
    assert followed([1], notes) == ({}, [3])
    assert followed([1, 4], notes) == ({}, [3, 5])
    assert followed([2], notes, me=1) == ({}, [3])


def test_a_rank_that_knows_or_has_raised_ends_the_search():
    assert followed([1, 5], {1: {"peers": [2], "found": {"3": "is gone"}}}) == ({3: "is gone"}, [5])
    assert followed([1], {1: {"peers": [2]}, 2: {"raised": "raised ValueError"}}) == ({2: "raised ValueError"}, [])
    assert followed([1], {1: {"peers": [0], "found": {}}}) == ({}, []), "each has lost the other, both live"
