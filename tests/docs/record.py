"""Runs a command, and records its cost and its result in a report of docs/reports.

    python tests/docs/record.py training.json reviews --result out/metrics.json -- python scripts/… --output out

The report has the machine, the commit and the versions, and for each name: the command, the date, the seconds of the
clock and of the processor, the peak memory of the largest process, and the JSON file of --result. An earlier run of
this name is replaced. `figures.py` writes the numbers of the reports into the pages.
"""

import argparse
import resource
import shlex
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from toolkit.common import identity, read_json, write_json  # noqa: E402


def measure(command: list[str]) -> dict:
    """Runs a command, and returns its cost. Raises CalledProcessError if it fails."""
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


def medians(rounds: list):
    """The median of each number of the rounds, which are dictionaries with the same names."""
    first = rounds[0]
    if not isinstance(first, dict):
        return statistics.median(rounds)
    return {name: medians([results[name] for results in rounds]) for name in first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=lambda name: ROOT / "docs" / "reports" / name)
    parser.add_argument("name")
    parser.add_argument("--result", type=Path, help="a JSON file that the command writes")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    machine = identity()
    report = read_json(args.report) if args.report.exists() else {"machine": machine, "runs": {}}
    if report["machine"] != machine or machine["commit"].endswith("-dirty"):
        parser.error("expected a clone without changes, and a report of the same machine, commit and versions")
    if args.result and args.result.exists():
        parser.error(f"{args.result} exists; expected a file that the command writes. Remove it.")
    run = measure(args.command)
    result = read_json(args.result) if args.result else {}
    if "history" in result:  # without the losses between evaluations, which would make the report long
        result["history"] = [step for step in result["history"] if "validation" in step]
    report["runs"][args.name] = run | {"result": result}
    write_json(args.report, report)


if __name__ == "__main__":
    main()
