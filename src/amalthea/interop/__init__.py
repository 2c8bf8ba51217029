"""Weights in other formats, both ways."""
