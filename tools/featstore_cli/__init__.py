"""The ``featstore`` command. :mod:`featstore_cli.main` is where it begins."""
