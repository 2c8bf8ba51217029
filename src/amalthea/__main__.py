"""`python -m amalthea` is the `amalthea` command."""

from amalthea.cli.main import main

if __name__ == "__main__":
    main()
