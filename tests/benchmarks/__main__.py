"""`python -m tests.benchmarks [--quick] [--json FILE] [--only NAME …] [--peers NAME …]`."""

from .report import main

if __name__ == "__main__":
    main()
