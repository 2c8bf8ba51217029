"""Reports made from a run's own records."""
