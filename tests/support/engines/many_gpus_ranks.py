"""One process of a row of benchmarks/many_gpus.py: `run_on` starts files, and that one is part of a package."""

import sys
from pathlib import Path

from benchmarks.many_gpus_rank import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
