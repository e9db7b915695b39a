"""The `headrace` command: Ctrl-C is quiet from the first moment on, also while the command line itself is loaded."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from cluster.cli.main import main as run  # takes about a second, which a Ctrl-C may meet

        run()
    except KeyboardInterrupt:
        sys.exit(130)
