"""transforms: see the table of rooms."""
