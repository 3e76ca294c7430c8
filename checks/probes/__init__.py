"""Programs that the checks start as processes of their own, most of them on several ranks.

A probe imports the learner's file by its path, calls what it defines, and writes what it saw. The check judges that.
The programs log_* and record_* make the logs that a learner diagnoses: they train with planted mistakes, and name them.
"""
