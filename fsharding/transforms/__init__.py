"""`gather_unit`, `scatter_grads`, `value_and_grad`, `scan`, `remat`, `shard_map` and the runtime behind them.

A leaf *at rest* is a DTensor of the state; *in flight*, inside a loss function, it is a `Local`: this rank's shard and
its sharding. *Data axes* are `replica`, `dp`, `ep` and `cp`. A *term* is one rank's part of a sum over ranks.
"""
