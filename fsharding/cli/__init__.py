"""cli: see the table of rooms."""
