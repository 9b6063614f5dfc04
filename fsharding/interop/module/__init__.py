"""module: see the table of rooms."""
