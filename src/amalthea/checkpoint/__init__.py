"""Whole checkpoints: written aside, checked, renamed into place, resharded on load."""
