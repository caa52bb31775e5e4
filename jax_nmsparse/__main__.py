"""``python -m jax_nmsparse``."""

import sys

from jax_nmsparse.cli import main

if __name__ == "__main__":
    sys.exit(main())
