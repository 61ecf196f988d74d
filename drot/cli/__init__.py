"""The command line: `drot prune | finetune | eval | convert | bench | run | info | demo`."""
