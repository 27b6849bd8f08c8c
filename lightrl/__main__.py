"""`lightrl` and `python -m lightrl`: loads the command line; Ctrl-C may interrupt loading."""

import signal
import sys
from typing import Any


def command() -> None:
    """Entry point of the `lightrl` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not with `nohup` or `&` in a script
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from lightrl.cli import main
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    main()


def _interrupt(signum: int, frame: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process, also inside of C
    raise KeyboardInterrupt


if __name__ == "__main__":
    command()
