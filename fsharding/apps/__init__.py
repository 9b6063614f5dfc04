"""Programs on top of the library: the command line, benchmarks, notebooks, and data for training."""
