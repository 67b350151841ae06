"""The pictures of speeds: draws docs/benchmarks.png and docs/speed.png from a report.

    python tests/docs/pictures.py

Each picture has the digest of its report, so that a test finds pictures of another one.
"""

import hashlib
import json

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from record import ROOT
from toolkit.pictures import plot_speeds

REPORT = ROOT / "docs" / "reports" / "zen5.json"
DIGEST = "SHA-256 of the report"
# What the README's picture shows.
WORKLOADS = {"reviews": "film reviews, batches of 32", "single": "one sentence of 12 tokens"}
OMITTED = {"ours"}


def digest() -> str:
    return hashlib.sha256(REPORT.read_bytes()).hexdigest()


def for_readme(report: dict) -> dict:
    """The report with the rows of the README's picture only."""
    rows = [row for row in report["rows"] if row["workload"] in WORKLOADS and row["variant"] not in OMITTED]
    return report | {"rows": [row | {"workload": WORKLOADS[row["workload"]]} for row in rows]}


def main() -> None:
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    report["model"] = "BERT-base"
    report["machine"]["processor"] = "two cores of an AMD EPYC (Zen 5)"
    for name, shown in (("benchmarks.png", report), ("speed.png", for_readme(report))):
        path = ROOT / "docs" / name
        plot_speeds(shown, path)
        information = PngInfo()
        information.add_text(DIGEST, digest())
        Image.open(path).save(path, pnginfo=information, optimize=True)


if __name__ == "__main__":
    main()
