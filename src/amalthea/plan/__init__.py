"""What a run will need and how fast it will go, before it starts."""
