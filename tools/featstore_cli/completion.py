"""``featstore completion``: what has a shell complete the command; click makes it."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from featstore_cli.options import shared_options


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@shared_options
def command(shell: str) -> None:
    """Print what has SHELL complete commands and options of featstore. Put it where the shell reads it when
    it starts:

    \b
    featstore completion bash > ~/.local/share/bash-completion/completions/featstore
    featstore completion zsh > a folder of $fpath/_featstore
    featstore completion fish > ~/.config/fish/completions/featstore.fish
    """
    from featstore_cli.main import cli

    made = get_completion_class(shell)
    assert made is not None
    # not of its own class, which asks a bash for its version
    click.echo(ShellComplete.source(made(cli, {}, "featstore", "_FEATSTORE_COMPLETE")))
