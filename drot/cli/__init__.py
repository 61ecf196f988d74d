"""The command line: `drot prune | finetune | eval | convert | bench | info | demo`."""
