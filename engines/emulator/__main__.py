"""`python -m engines.emulator`: the same as `pdgate emulate`."""

from __future__ import annotations

import argparse
import sys

from engines.emulator.main import add_arguments, run


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="pdgate emulate", description="An emulated SGLang server.")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
