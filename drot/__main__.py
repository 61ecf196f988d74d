"""`python -m drot` is the command line."""

from drot.cli import main

main()
