"""Muon and AdamW, who takes which parameter, and the learning-rate schedule."""
