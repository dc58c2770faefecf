"""`python -m nvium_titan.train`, alone or under torchrun: train from a TOML file."""

import sys

from nvium_titan.train.launch import main

sys.exit(main())
