"""`python -m tests.mutants make | coverage | run`: see README.md."""

import argparse
import pathlib

from tests.mutants import reach, running, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="draw mutants anew, and write mutants.txt")
    make.add_argument("--count", type=int, default=150)
    make.add_argument("--seed", type=int, default=0)
    coverage = commands.add_parser("coverage", help="write the database of the tests that run each line")
    coverage.add_argument("tests", nargs="*", help="files or folders of tests, by default all of the packages")
    run = commands.add_parser("run", help="run the tests against mutants, and write results.txt")
    run.add_argument("--modules", nargs="+", default=[""], metavar="PATH", help="mutants of these files or folders")
    run.add_argument("--ids", nargs="+", help="these mutants")
    run.add_argument("--ranks", action="store_true", help="ask those on MPI ranks, too, where no other test fails")
    run.add_argument("--nearest", action="store_true", help="ask the nearest tests alone, in a third of the time")
    run.add_argument("--workers", type=int, default=2)
    run.add_argument("--database", type=pathlib.Path, default=reach.DATABASE, help="coverage.py's, with contexts")
    options = parser.parse_args()
    if options.command == "make":
        table.write(table.draw(options.count, options.seed))
    elif options.command == "coverage":
        reach.measure(options.tests)
    else:
        run_mutants(options)


def run_mutants(options: argparse.Namespace) -> None:
    """Run those that are asked for, write each result at once, and print what is not killed any more."""
    before = table.read(table.Result)
    mutants = [m for m in table.read(table.Mutant).values() if m.file.startswith(tuple(options.modules))]
    mutants = [m for m in mutants if not m.equivalent and (options.ids is None or m.id in options.ids)]
    after = dict(before)
    runner = running.Runner(reach.Reach(options.database), before, options.ranks, options.nearest)
    for result in runner.run(mutants, options.workers):
        after[result.id] = result
        table.write([*after.values()])
        print(*result, flush=True)
    kills = [after[m.id].killer for m in mutants if after[m.id].is_kill]
    print(f"{len(kills)} of {len(mutants)} killed")
    for mutant in mutants:
        if mutant.id in before and before[mutant.id].is_kill and not after[mutant.id].is_kill:
            print("not killed any more:", *mutant, "before by", before[mutant.id].killer)
    for test in running.failing(kills):
        print("fails without a mutant:", test)


if __name__ == "__main__":
    main()
