"""Imported last by the server that forks scripts: each fork's garbage collector leaves alone what was imported.

It would look through all of it, and so copy it.
"""

import gc

gc.collect()
gc.freeze()
