"""The command line: `drot prune | eval | convert | bench | info | demo`."""
