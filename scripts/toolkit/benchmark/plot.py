"""The picture of a benchmark: speed relative to BertModel, a panel for each precision, and time against tokens."""

from pathlib import Path

from toolkit.cli import shortened
from toolkit.files import atomic_file

PRECISIONS = ("float32", "bfloat16", "int8")
STRONG, TEXT, GRID = "#d1410c", "#404040", "#dddddd"
# The bars of a group in their order. Ours: one hue, strong for the optimised model, lighter for the others; the others:
# greys, one for each runtime. A variant is drawn like the longest of these names that its own begins with.
LOOKS = {
    "ours-": STRONG,
    "ours": "#f0a07a",
    "ours-eager": "#f5b896",
    "ours-compiled": "#f9d3c0",
    "openvino": "#5c5c5c",
    "ctranslate2": "#757575",
    "onnx": "#8f8f8f",
    "sentence-transformers": "#a3a3a3",
    "bert": "#b3b3b3",
    "bert-compiled": "#cccccc",
    "bert-eager": "#e0e0e0",
}


def plot(report: dict, path: Path) -> None:
    """Draws a panel for each precision in which a variant was timed, and one for linearity if it was measured."""
    import matplotlib  # in an extra
    import numpy as np
    from PIL import Image  # which matplotlib requires

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in report["rows"] if row["error"] is None]
    timed = [row for row in timed if row["variant"] != "bert"] or timed
    by_precision = {name: [row for row in timed if row["precision"] == name] for name in PRECISIONS}
    panels = [(bars, name, rows) for name, rows in by_precision.items() if rows]
    if report["linearity"]:
        panels.append((lines, "", report["linearity"]))
    columns = 2 if len(panels) == 4 else max(1, len(panels))
    grid = [panels[i : i + columns] for i in range(0, len(panels), columns)] or [[]]
    heights = [max((height(rows) for draw, _, rows in row if draw is bars), default=4) for row in grid]
    figure, axes = pyplot.subplots(
        len(grid), columns, figsize=(5.6 * columns, sum(heights) + 0.8), height_ratios=heights,
        layout="constrained", squeeze=False, facecolor="white",
    )  # fmt: skip
    for (draw, title, rows), axis in zip(panels, axes.flat, strict=False):
        draw(axis, title, rows)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    machine = report["machine"]
    title = f"{shortened(report['model'], 80)}; {machine['processor']}, threads: {machine['threads']}"
    figure.suptitle(title + "\n", fontsize="medium")
    figure.set_dpi(110)
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB").quantize(128)  # a third the size
    with atomic_file(path) as temporary:
        picture.save(temporary, "PNG", optimize=True)
    pyplot.close(figure)


def height(rows: list[dict]) -> float:
    """The inches that a panel with a bar for each of these rows is high."""
    return 1.6 + 0.14 * len(rows) + 0.12 * len({row["workload"] for row in rows})


def colors(variants: set[str]) -> dict[str, str]:
    """The colour of each variant, in the order of the bars."""

    def look(variant: str) -> str:
        return max((name for name in LOOKS if variant.startswith(name)), key=len)

    ordered = sorted(variants, key=lambda variant: list(LOOKS).index(look(variant)))
    return {variant: LOOKS[look(variant)] for variant in ordered}


def bars(axis, title: str, rows: list[dict]) -> None:
    """Draws a group for each workload, with a bar for each variant. The figure of the fastest is bold."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    color_of = colors({row["variant"] for row in rows})
    best = {workload: max(row["vs_bert"] for row in rows if row["workload"] == workload) for workload in workloads}
    thick = min(0.84 / len(color_of), 0.24)
    for i, (variant, color) in enumerate(color_of.items()):
        own = [row for row in rows if row["variant"] == variant]
        places = [workloads.index(row["workload"]) + (i - (len(color_of) - 1) / 2) * thick for row in own]
        axis.barh(places, [row["vs_bert"] for row in own], 0.9 * thick, color=color, label=variant)
        for place, row in zip(places, own, strict=True):
            leads = row["vs_bert"] == best[row["workload"]]
            axis.annotate(
                f"{row['vs_bert']:.2f}", (row["vs_bert"], place), (3, 0), textcoords="offset points", va="center",
                fontsize=7, color=STRONG if variant.startswith("ours") else TEXT, weight="bold" if leads else "normal",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.2},  # covers the line of BertModel
            )  # fmt: skip
    axis.axvline(1, color="black", linewidth=1, label="BertModel, float32")
    axis.set_yticks(range(len(workloads)), [label(workload, rows) for workload in workloads], fontsize="small")
    axis.set_ylim(len(workloads) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, 1.12 * max(1.1, *best.values()))
    axis.grid(axis="x", color=GRID, linewidth=0.5)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel("speed relative to BertModel in float32", fontsize="small")
    axis.set_title(title, weight="bold", loc="left")
    axis.legend(fontsize="small", frameon=False)


def label(workload: str, rows: list[dict]) -> str:
    fill_rate = next(row["fill_rate"] for row in rows if row["workload"] == workload)
    return workload if fill_rate == 1 else f"{workload}\n{fill_rate:.0%} filled"


def lines(axis, title: str, rows: list[dict]) -> None:
    """Draws time against non-padding tokens, with the GEMM lower bound."""
    looks = {
        "sequences": (STRONG, "o", "1 to 256 sequences of mixed lengths"),
        "fill_rate": (LOOKS["ours"], "s", "32 × 128 tokens, fill rate 10 to 100 %"),
    }
    for series, (color, marker, text) in looks.items():
        own = sorted((row for row in rows if row["series"] == series), key=lambda row: row["tokens"])
        axis.plot([row["tokens"] for row in own], [row["seconds"] for row in own],
                  color=color, marker=marker, markersize=4, label=text)  # fmt: skip
    bound = sorted({(row["tokens"], row["lower_bound"]) for row in rows})
    axis.plot(*zip(*bound, strict=True), color=LOOKS["openvino"], linestyle=":", label="GEMM lower bound")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.grid(color=GRID, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("non-padding tokens in the batch", fontsize="small")
    axis.set_ylabel("seconds per batch", fontsize="small")
    axis.set_title("float32: time against tokens, ours-optimised", weight="bold", loc="left")
    axis.legend(fontsize="small", frameon=False)
