"""sharding: see the table of rooms."""
