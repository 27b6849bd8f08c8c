"""`lightrl` and `python -m lightrl`: loads the command line, which Ctrl-C may already end."""

import os
import sys

from lightrl import interrupts


def command() -> None:
    """Entry point of the `lightrl` command. After a failure the process ends, whatever threads are left in it."""
    interrupts.watch()
    try:
        from lightrl.cli import end_in_time, main
    except BaseException as error:
        if os.environ.get("LIGHTRL_DEBUG") == "1" or not (isinstance(error, KeyboardInterrupt) or interrupts.came()):
            raise
        print("Interrupted.", file=sys.stderr)
        interrupts.ends()
        sys.exit(interrupts.STATUS)
    try:
        main()
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        if status == interrupts.STATUS:
            interrupts.ends()
        if status not in (None, 0):
            end_in_time(status if isinstance(status, int) else 1)
        raise


if __name__ == "__main__":
    command()
