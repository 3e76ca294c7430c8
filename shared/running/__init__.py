"""What makes the scripts run well: options, a run's folder, restarts, one writer, progress, errors and signals."""
