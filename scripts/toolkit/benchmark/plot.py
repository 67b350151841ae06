"""The picture of a benchmark: speed relative to BertModel, a panel for each workload."""

from pathlib import Path

from toolkit.benchmark import VARIANTS
from toolkit.pictures import new_figure

# The colours of bars in float32, bfloat16 and int8.
OURS = {"float32": "#f5b08a", "bfloat16": "#e8743b", "int8": "#c43c0a"}
OTHERS = {"float32": "#c9c9c9", "bfloat16": "#969696", "int8": "#5c5c5c"}


def plot(report: dict, path: Path) -> None:
    """Draws the speed of each variant."""
    rows = [row for name in VARIANTS for row in report["rows"] if row["variant"] == name]
    workloads = list(dict.fromkeys(row["workload"] for row in report["rows"]))
    height = 1.5 + 0.28 * len({row["variant"] for row in rows})
    with new_figure(path, 3 + 3 * len(workloads), height) as figure:
        panels = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
        for axis, workload in zip(panels, workloads, strict=True):
            shown = [row for row in rows if row["workload"] == workload]
            variants = [VARIANTS[row["variant"]] for row in shown]
            labels = [f"{variant.runtime}, {variant.details}" for variant in variants]
            colors = [(OURS if each.runtime == "ScratchBert" else OTHERS)[each.precision] for each in variants]
            bars = axis.barh(labels, [row["vs_bert"] for row in shown], color=colors)
            axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
            axis.set(title=workload, xlabel="times as fast as BertModel in float32")
            axis.axvline(1, color="black", linewidth=1)
            axis.margins(x=0.15)  # for the labels
            axis.spines[["top", "right", "left"]].set_visible(False)
        panels[0].invert_yaxis()
        figure.suptitle(f"{report['model'][-60:]} on {report['machine']['processor']}")
