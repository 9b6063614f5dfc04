"""The command line: `fsharding train`, `plan`, `inspect`, `reshard`, `export`."""
