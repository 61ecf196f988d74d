"""`python -m drot`."""

from drot.cli.app import main

main()
