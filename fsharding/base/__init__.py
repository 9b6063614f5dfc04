"""Errors, trees, names of public calls, and all private names of torch."""
