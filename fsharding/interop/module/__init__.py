"""An `nn.Module` as a pure function over sharded parameters; see `functionalize`."""
