"""``python -m pipeplan``: the command line."""

from pipeplan.cli.app import main

main()
