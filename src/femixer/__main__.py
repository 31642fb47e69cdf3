"""`python -m femixer` is the `femixer` command."""

import sys

from femixer.cli import main

sys.exit(main())
