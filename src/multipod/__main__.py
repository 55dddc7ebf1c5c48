"""`python -m multipod` is the `multipod` command."""

from multipod.cli.main import main

if __name__ == "__main__":
    main()
