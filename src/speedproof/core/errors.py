"""The one kind of error a person is meant to read, and the door every script goes through."""

import errno
import os
import signal
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


MENDING = {
    errno.ENOSPC: "; make room and run it again",
    errno.EDQUOT: "; make room and run it again",
    errno.EACCES: "; allow it, or choose another folder",
    errno.EROFS: "; allow writing there, or choose another folder",
    errno.ENOTDIR: "; a part of this path is a file, choose another folder",
    errno.ENOENT: "; check the path, or run the rule that makes it",
}
"""What to do about the commonest refusals of a file system."""


def run(main: Callable[..., object]) -> None:
    """Run a script's `main` as a command whose options are the parameters of `main`.

    A `UserError` becomes one line on stderr and exit code 2; any other exception keeps its traceback,
    since it is a fault of this program and not of its user. TERM becomes `Preempted`, so that nothing half-done stays.
    """
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=main.__doc__)(main)
    signal.signal(signal.SIGTERM, _preempt)
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
        place = error.filename2 or error.filename  # of a copy the second is the one that could not be written
        what = f"{place}: " if place else ""
        advice = MENDING.get(error.errno, "")
        print(f"error: {what}{os.strerror(error.errno) if error.errno else error}{advice}", file=sys.stderr)
        sys.exit(EXIT_USER)


def _preempt(number: int, frame: object) -> None:
    raise Preempted("TERM received; nothing half-done is kept, start again")
