"""``python -m pymllm_interp``: the command ``pymllm-interp``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
