"""comm: see the table of rooms."""
