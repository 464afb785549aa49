"""``python -m featstore_cli``: the same as ``featstore``."""

from featstore_cli.main import main

if __name__ == "__main__":
    main()
