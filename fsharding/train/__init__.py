"""train: see the table of rooms."""
