"""The one kind of error a person is meant to read, and the door every script goes through."""

import os
import sys
from collections.abc import Callable

EXIT_USER = 2
"""Exit code of a script that stopped on something its user can mend."""


class UserError(Exception):
    """Something the user can mend: names the key or file, what was found, and what to do, in one sentence."""


class Preempted(Exception):
    """The job is ending (time limit or TERM); what is done has been saved and the next attempt goes on."""


EXIT_PREEMPTED = 75
"""Exit code of a script that saved its state and wants to be started again (EX_TEMPFAIL)."""


def run(main: Callable[..., object]) -> None:
    """Run a script's `main` as a command whose options are the parameters of `main`.

    A `UserError` becomes one line on stderr and exit code 2; any other exception keeps its traceback,
    since it is a fault of this program and not of its user.
    """
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=main.__doc__)(main)
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER)
    except Preempted as stop:
        print(f"stopped early: {stop}", file=sys.stderr)
        sys.exit(EXIT_PREEMPTED)
    except OSError as error:
        # A full disk, a missing file or a forbidden folder is the user's to mend, and a traceback hides it.
        what = f"{error.filename}: " if error.filename else ""
        print(f"error: {what}{os.strerror(error.errno) if error.errno else error}", file=sys.stderr)
        sys.exit(EXIT_USER)
