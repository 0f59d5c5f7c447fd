"""`python -P -m headrace`: the same as the `headrace` command."""

from headrace.gateway.cli import main

main()
