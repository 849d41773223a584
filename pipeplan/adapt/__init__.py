"""What changes with measurements: calibration of costs from measured traces."""
