"""Parts that register by name: transports between ranks of one host, Megatron Core, Transformer Engine."""
