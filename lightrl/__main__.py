"""`python -m lightrl` is the `lightrl` command."""

from lightrl.cli import main

main()
