"""Ranks of one machine exchange tensors in memory that they share."""
