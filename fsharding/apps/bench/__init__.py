"""Side-by-side measurements: every contender in the same processes, in interleaved rounds."""
