"""`gather_unit`, `scatter_grads`, `value_and_grad`, `scan`, `remat`, `shard_map` and the runtime behind them."""
