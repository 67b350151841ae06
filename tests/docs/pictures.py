"""The pictures of speeds: draws docs/benchmarks.png and docs/speed.png from a report.

    python tests/docs/pictures.py

Each picture has the digest of its report, so that a test finds pictures of another one.
"""

import hashlib
import json
import sys
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from toolkit.benchmark.plot import plot  # noqa: E402
from toolkit.pictures import new_figure  # noqa: E402

REPORT, DIGEST = ROOT / "docs" / "reports" / "zen5.json", "SHA-256 of the report"
# The variants of each runtime in float32, bfloat16 and int8, from bottom to top.
RUNTIMES = {
    "sentence-transformers": ["sentence-transformers"],
    "ONNX Runtime": ["onnx", "onnx-int8"],
    "OpenVINO": ["openvino", "openvino-bf16", "openvino-int8"],
    "CTranslate2": ["ctranslate2", "ctranslate2-int8"],
    "ScratchBert": ["ours-optimised", "ours-bf16", "ours-int8"],
}
PRECISIONS = ["float32", "bfloat16", "int8"]
OURS, OTHERS = ["#f5b08a", "#e8743b", "#c43c0a"], ["#c9c9c9", "#969696", "#5c5c5c"]
TITLES = {"reviews": "Film reviews, batches of 32", "single": "One sentence of 12 tokens"}


def digest() -> str:
    return hashlib.sha256(REPORT.read_bytes()).hexdigest()


def plot_speeds(report: dict, path: Path) -> None:
    """A panel for each workload, with the bars of each runtime in their precisions."""
    rows = {(row["variant"], row["workload"]): row for row in report["rows"] if row["error"] is None}
    with new_figure(path, 10, 4.2) as figure:
        axes = figure.subplots(1, len(TITLES), sharey=True)
        for axis, (workload, title) in zip(axes, TITLES.items(), strict=True):
            place, ticks = 0.0, []
            for runtime, variants in RUNTIMES.items():
                colors = OURS if runtime == "ScratchBert" else OTHERS
                start = place
                for row in (rows[variant, workload] for variant in reversed(variants)):
                    color = colors[PRECISIONS.index(row["precision"])]
                    bar = axis.barh(place, row["vs_bert"], 0.9, color=color)
                    axis.bar_label(bar, [f"{row['vs_bert']:.1f}  {row['precision']}"], padding=4, fontsize=8)
                    place += 1
                ticks.append((start + place - 1) / 2)
                place += 0.8
            axis.axvline(1, color="black", linewidth=1)
            axis.set_yticks(ticks, RUNTIMES)
            axis.margins(x=0.25)  # for the labels
            axis.set_title(title, loc="left", weight="bold")
            axis.set_xlabel("times as fast as BertModel in float32 (the line)")
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.tick_params(axis="y", length=0)
        axes[0].get_yticklabels()[-1].set_weight("bold")
        figure.suptitle("BERT-base on two cores of an AMD EPYC (Zen 5)", fontsize="medium")


def main() -> int:
    """Returns the exit code."""
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    for name, draw in (("benchmarks.png", plot), ("speed.png", plot_speeds)):
        path = ROOT / "docs" / name
        draw(report, path)
        information = PngInfo()
        information.add_text(DIGEST, digest())
        Image.open(path).save(path, pnginfo=information, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
