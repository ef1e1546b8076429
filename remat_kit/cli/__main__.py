"""`python -m remat_kit.cli`."""

from remat_kit.cli import main

if __name__ == "__main__":
    main()
