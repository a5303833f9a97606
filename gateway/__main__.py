"""`python -m gateway`: the command line, nothing else."""

import sys

from gateway.cli import main

sys.exit(main())
