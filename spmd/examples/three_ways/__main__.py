"""python -m spmd.examples.three_ways: list the modules."""

import spmd.examples.three_ways

if __name__ == "__main__":
    print(spmd.examples.three_ways.__doc__)
