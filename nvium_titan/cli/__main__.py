"""`python -m nvium_titan.cli`: the `nvium` command."""

import sys

from nvium_titan.cli import main

sys.exit(main())
