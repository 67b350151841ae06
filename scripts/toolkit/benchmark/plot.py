"""The picture of a benchmark: speed relative to BertModel, a panel for each precision."""

from pathlib import Path

from toolkit.cli import shortened
from toolkit.pictures import new_figure

PRECISIONS = ("float32", "bfloat16", "int8")
STRONG, TEXT = "#d1410c", "#404040"
# The bars of a group in their order. Ours: one hue, strong for the optimised model, lighter for the others; the others:
# greys, one for each runtime. A variant is drawn like the longest of these names that its own begins with.
LOOKS = {
    "ours-": STRONG,
    "ours": "#f0a07a",
    "ours-eager": "#f5b896",
    "ours-compiled": "#f9d3c0",
    "ours-aotinductor": "#e8874f",
    "openvino": "#5c5c5c",
    "ctranslate2": "#757575",
    "onnx": "#8f8f8f",
    "sentence-transformers": "#a3a3a3",
    "bert": "#b3b3b3",
    "bert-compiled": "#cccccc",
    "bert-eager": "#e0e0e0",
}


def plot(report: dict, path: Path) -> None:
    """Draws a panel for each precision in which a variant was timed."""
    timed = [row for row in report["rows"] if row["error"] is None]
    timed = [row for row in timed if row["variant"] != "bert"] or timed
    by_precision = {name: [row for row in timed if row["precision"] == name] for name in PRECISIONS}
    panels = {name: rows for name, rows in by_precision.items() if rows}
    most, machine = max(map(len, panels.values()), default=10), report["machine"]
    with new_figure(path, 5.6 * max(1, len(panels)), 2.5 + 0.14 * most) as figure:
        axes = figure.subplots(1, max(1, len(panels)), squeeze=False).flat
        for (title, rows), axis in zip(panels.items(), axes, strict=False):
            bars(axis, title, rows)
        title = f"{shortened(report['model'], 80)}; {machine['processor']}, threads: {machine['threads']}"
        figure.suptitle(title, fontsize="medium")


def colors(variants: set[str]) -> dict[str, str]:
    """The colour of each variant, in the order of the bars."""
    look = {variant: max((name for name in LOOKS if variant.startswith(name)), key=len) for variant in variants}
    return {variant: LOOKS[look[variant]] for variant in sorted(look, key=lambda each: list(LOOKS).index(look[each]))}


def bars(axis, title: str, rows: list[dict]) -> None:
    """Draws a group for each workload, with a bar for each variant. The figure of the fastest is bold."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    color_of = colors({row["variant"] for row in rows})
    best = {workload: max(row["vs_bert"] for row in rows if row["workload"] == workload) for workload in workloads}
    thick = min(0.84 / len(color_of), 0.24)
    for i, (variant, color) in enumerate(color_of.items()):
        speeds = {row["workload"]: row["vs_bert"] for row in rows if row["variant"] == variant}
        places = [workloads.index(name) + (i - (len(color_of) - 1) / 2) * thick for name in speeds]
        bar = axis.barh(places, list(speeds.values()), 0.9 * thick, color=color, label=variant)
        color = STRONG if variant.startswith("ours") else TEXT
        texts = axis.bar_label(bar, fmt="%.2f", padding=3, fontsize=7, color=color)
        for text, (workload, speed) in zip(texts, speeds.items(), strict=True):
            text.set_weight("bold" if speed == best[workload] else "normal")
    axis.axvline(1, color="black", linewidth=1, label="BertModel, float32")
    axis.set_yticks(range(len(workloads)), [label(workload, rows) for workload in workloads])
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel("speed relative to BertModel in float32")
    axis.set_title(title, weight="bold", loc="left")
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.1), ncols=2)  # below: it hides no figure


def label(workload: str, rows: list[dict]) -> str:
    fill_rate = next(row["fill_rate"] for row in rows if row["workload"] == workload)
    return workload if fill_rate == 1 else f"{workload}\n{fill_rate:.0%} filled"
