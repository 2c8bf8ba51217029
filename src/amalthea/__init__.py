"""Amalthea trains mixture-of-experts language models on shared supercomputers."""

__version__ = "0.1.0"
