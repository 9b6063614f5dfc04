"""Programs on top of the library: the command line, benchmarks, and data for training."""
