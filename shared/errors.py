"""Define the errors that end a script with one line instead of a traceback (`shared.running.script.run_main`)."""


class UsageError(ValueError):
    """A user's mistake, raised on every rank. It ends the script with exit code 2."""

    kind, exit_code = "error", 2


class StorageError(UsageError):
    """A file that a rank cannot read or write.

    The problem may pass, so Ray tries again if the run has saved a checkpoint.
    """


class RunFailed(RuntimeError):
    """A run that has failed for good, and not through a user's mistake. It ends the script with exit code 1."""

    kind, exit_code = "failed", 1
