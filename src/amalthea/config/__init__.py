"""One run's configuration, composed of every component's, and its checks and overrides."""
