"""Activation memory, and what a step used of it."""
