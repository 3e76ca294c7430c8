"""Code that needs Ray: starting or joining it, training on its workers, and checkpoints in its storage."""

import ray.train

if not hasattr(ray.train, "UserCallback"):
    raise SystemExit(
        "error: RAY_TRAIN_V2_ENABLED chooses an older Ray Train, which lacks what this code uses: unset it"
    )
