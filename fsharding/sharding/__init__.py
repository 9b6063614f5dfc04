"""Values that say where a leaf lives: boxes, partition specs, named shardings, strategies, layouts."""
