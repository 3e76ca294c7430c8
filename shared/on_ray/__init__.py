"""What needs Ray: starting or joining it, training on its workers, and a run's checkpoints in its storage."""
