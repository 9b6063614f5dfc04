"""Placement of leaves as values: boxes, partition specs, named shardings, strategies, layouts."""
