"""What every layer may use: errors, the configuration base, units, the process world."""
