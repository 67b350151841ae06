"""The picture of a benchmark: speed relative to BertModel, a panel for each workload."""

from pathlib import Path

from toolkit.benchmark import VARIANTS
from toolkit.cli import shortened
from toolkit.pictures import new_figure

# The colours of bars in float32, bfloat16 and int8.
OURS = {"float32": "#f5b08a", "bfloat16": "#e8743b", "int8": "#c43c0a"}
OTHERS = {"float32": "#c9c9c9", "bfloat16": "#969696", "int8": "#5c5c5c"}


def plot(report: dict, path: Path) -> None:
    """Draws the speed of each variant."""
    workloads = list(dict.fromkeys(row["workload"] for row in report["rows"]))
    shown = [name for name in VARIANTS if any(row["variant"] == name for row in report["rows"])]
    with new_figure(path, 3 + 3 * len(workloads), 1.5 + 0.28 * len(shown)) as figure:
        panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
        for axis, workload in zip(panels, workloads, strict=True):
            axis.set(title=workload, xlabel="times as fast as BertModel in float32")
            axis.axvline(1, color="black", linewidth=1)
            axis.margins(x=0.15)  # for the labels
            axis.spines[["top", "right", "left"]].set_visible(False)
            for row in report["rows"]:
                if row["workload"] == workload and row["variant"] in shown:
                    colors = OURS if row["variant"].startswith("ours") else OTHERS
                    place = shown.index(row["variant"])
                    bar = axis.barh(place, row["vs_bert"], color=colors[row["precision"]])
                    axis.bar_label(bar, fmt="%.1f", padding=3, fontsize=8)
        labels = [f"{VARIANTS[name].runtime}, {VARIANTS[name].details}" for name in shown]
        panels[0].set_yticks(range(len(shown)), labels)
        panels[0].invert_yaxis()
        figure.suptitle(f"{shortened(report['model'], 60)} on {report['machine']['processor']}")
