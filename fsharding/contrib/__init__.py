"""Parts that register by name: optimizers, transports between ranks of one host, Megatron Core, Transformer Engine."""
