"""The errors that end a script with one line instead of a traceback (`shared.script.run_main`)."""


class UsageError(ValueError):
    """The user's mistake, known to every rank: exit code 2."""

    kind, exit_code = "error", 2


class StorageError(UsageError):
    """A file that a rank cannot read or write. That may pass: Ray tries again if the run has saved something."""


class RunFailed(RuntimeError):
    """A run that ended for good through no mistake of its user: exit code 1."""

    kind, exit_code = "failed", 1
