"""The model family: a decoder-only transformer with a mixture of experts."""
