"""Meshes, the groups of their ranks, and what happens when a rank is missing."""
