"""The command line: `fsharding train`, `plan`, `bench`, `inspect`, `reshard`, `export`."""
