"""A training run: composed in `build.py`, told in `loop.py`."""
