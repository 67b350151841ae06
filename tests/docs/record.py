"""Runs a command, and records its cost and its result in a report of docs/reports, for the figures of the pages.

    python tests/docs/record.py training.json reviews --result out/metrics.json -- python scripts/… --output out

The report has the machine, the commit and the versions, and for each name: the command, the date, the seconds of the
clock and of the processor, the peak memory of the largest process, and the JSON file of --result. A name that is there
already is replaced. A report is of one machine, one commit and one set of versions. `figures.py` compares the pages
with the reports.
"""

import argparse
import resource
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from toolkit.common import identity, read_json, write_json  # noqa: E402


def measure(command: list[str]) -> dict:
    """Runs a command, and returns what it cost. Raises CalledProcessError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "command": shlex.join(command),
        "date": date.today().isoformat(),
        "seconds": seconds,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_gb": after.ru_maxrss * 1024 / 1e9,
    }


def shortened(result: dict) -> dict:
    """The result without what would make reports long: losses between evaluations, and a cosine for each text."""
    kept = {name: value for name, value in result.items() if name != "data"}
    if "history" in kept:
        kept["history"] = [step for step in kept["history"] if "validation" in step]
    if "rows" in kept:
        kept["rows"] = [{name: value for name, value in row.items() if name != "cosines"} for row in kept["rows"]]
    return kept


def read_report(path: Path, machine: dict) -> dict:
    """The report, or a new one.

    Raises:
        ValueError: the report is of another machine, commit or version.
    """
    report = read_json(path) if path.exists() else {"machine": machine, "runs": {}}
    differing = [key for key, value in machine.items() if report["machine"].get(key) != value]
    if differing:
        raise ValueError(
            f"{path.name} is of another {', '.join(differing)}; expected one report for each. Record all "
            "its runs again, or choose another file."
        )
    return report


def add(path: Path, name: str, run: dict, machine: dict) -> None:
    """Adds a run to a report. Raises ValueError as `read_report` does."""
    report = read_report(path, machine)
    write_json(path, {**report, "runs": {**report["runs"], name: run}})


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    command = argv[argv.index("--") + 1 :] if "--" in argv else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=lambda name: ROOT / "docs" / "reports" / name)
    parser.add_argument("name")
    parser.add_argument("--result", type=Path, help="a JSON file that the command writes")
    args = parser.parse_args(argv[: len(argv) - len(command) - 1] if command else argv)
    machine = identity()
    if not command or machine["commit"].endswith("-dirty"):
        parser.error("expected a command after --, in a clone without changes")
    if args.result is not None and args.result.exists():
        parser.error(f"{args.result} exists; expected a file that the command writes. Remove it.")
    read_report(args.report, machine)  # before an hour is spent
    run = measure(command)
    add(args.report, args.name, run | {"result": shortened(read_json(args.result)) if args.result else None}, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
