"""Communication inside a group of ranks: buckets, ordered sums, exchanges, and plans of reshards.

Terms: a *wire* is the encoding in which a leaf is sent; a *format* has quantized values and scales. *Keyed* rounding is
stochastic rounding by a random key. A *transport* sends bytes; a *move* takes leaves from one sharding to another.
"""
