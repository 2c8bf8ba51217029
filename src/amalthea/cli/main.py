"""The `amalthea` command. Commands import what they need when they run, so that help comes at once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from amalthea import __version__
from amalthea.cli import data
from amalthea.cli.console import print_error
from amalthea.cli.generate import generate_command
from amalthea.cli.plan import plan_command
from amalthea.cli.recipes import recipes_command
from amalthea.cli.train import train_command
from amalthea.core.errors import AmaltheaError

USER_ERROR_EXIT_CODE = 2
INTERRUPT_EXIT_CODE = 130

app = typer.Typer(
    name="amalthea",
    help="Trains mixture-of-experts language models on shared supercomputers, in the 24 official EU languages.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train_command)
app.command("plan")(plan_command)
app.command("generate")(generate_command)
app.command("recipes")(recipes_command)
app.add_typer(data.app, name="data")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(f"amalthea {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    code = run(sys.argv[1:] if arguments is None else arguments)
    gc.freeze()  # else Python looks for cycles in all of torch before it ends, for nothing
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns 0, 2 for a user's error, 75 to be requeued, 130 after Ctrl-C."""
    try:
        outcome = typer.main.get_command(app).main(list(arguments), prog_name="amalthea", standalone_mode=False)
    except AmaltheaError as error:
        print_error(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPT_EXIT_CODE
    except Exception as error:
        # What the parser raises has no public base class, and another one in other releases of typer.
        if not hasattr(error, "format_message"):
            raise
        return _explain_usage(error)
    return outcome if isinstance(outcome, int) else 0


def _explain_usage(error: Any) -> int:
    """A mistake in the command line itself, on one line."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return USER_ERROR_EXIT_CODE
    message = error.format_message().rstrip(".").replace(". Did you", "; did you")
    message = message[:1].lower() + message[1:]
    option = getattr(error, "option_name", None)
    if option and "." in option:
        message += f"; overrides have no dashes: {option.lstrip('-')}=VALUE"
    context = getattr(error, "ctx", None)
    print_error(f"{message} (see `{context.command_path if context else 'amalthea'} --help`)")
    return USER_ERROR_EXIT_CODE
