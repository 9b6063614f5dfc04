"""Communication inside a group of ranks: buckets, ordered sums, exchanges, and plans of reshards."""
