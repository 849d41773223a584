"""``python -m pipeplan``: the command line."""

from pipeplan.cli.app import main

if __name__ == "__main__":  # processes that search beside this one import it, too
    main()
