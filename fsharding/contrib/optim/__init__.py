"""Optimizers that `fs.optim` imports at their first use: Adafactor, averages of parameters, noise, and torch's own."""
