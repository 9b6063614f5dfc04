"""interop: see the table of rooms."""
