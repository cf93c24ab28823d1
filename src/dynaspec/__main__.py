"""``python -m dynaspec``: the command line, where its script is not on the path."""

from dynaspec.cli.main import main

if __name__ == "__main__":
    main()
