"""Code that needs Ray: starting or joining it, training on its workers, and checkpoints in its storage."""
