"""`lightrl` and `python -m lightrl`: loads the command line, which Ctrl-C may already end."""

import os
import sys


def command() -> None:
    """Entry point of the `lightrl` command."""
    try:
        from lightrl.cli import main
    except KeyboardInterrupt:
        if os.environ.get("LIGHTRL_DEBUG") == "1":
            raise
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)  # as `main` does
    main()


if __name__ == "__main__":
    command()
