"""mesh: see the table of rooms."""
