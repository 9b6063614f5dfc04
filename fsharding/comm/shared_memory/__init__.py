"""shared_memory: see the table of rooms."""
