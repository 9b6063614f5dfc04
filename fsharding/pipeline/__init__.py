"""pipeline: see the table of rooms."""
