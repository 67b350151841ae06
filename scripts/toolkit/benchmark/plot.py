"""The plot of a benchmark: non-padding tokens per second, and time against the number of non-padding tokens."""

from pathlib import Path

from toolkit.cli import shortened
from toolkit.files import atomic_file


def plot(report: dict, path: Path) -> None:
    """Draws one panel for each of the two that the report has numbers for."""
    import matplotlib  # in an extra

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [draw for draw, rows in ((bars, report["rows"]), (lines, report["linearity"])) if rows]
    variants = {row["variant"] for row in report["rows"]}
    height = 3 + 0.16 * len(report["rows"]) if bars in panels else 5
    size = (8 * len(panels), max(height, 2 + 0.3 * len(variants)))
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for draw, axis in zip(panels, axes[0], strict=True):
        draw(axis, report)
    machine = report["machine"]
    title = f"{shortened(report['model'], 80)}\n{machine['processor']}, threads: {machine['threads']}"
    figure.suptitle(title, fontsize="medium")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=120)
    pyplot.close(figure)


def bars(axis, report: dict) -> None:
    """Draws a group for each workload with a bar for each variant, labelled with the speed-up over BertModel."""
    from matplotlib import colormaps

    rows = [row for row in report["rows"] if row["error"] is None]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    thick = 0.85 / len(variants)
    for i, variant in enumerate(variants):
        own = [row for row in rows if row["variant"] == variant]
        places = [workloads.index(row["workload"]) + (i - (len(variants) - 1) / 2) * thick for row in own]
        drawn = axis.barh(
            places, [row["tokens_per_second"] for row in own], thick, color=colormaps["tab20"](i), label=variant
        )
        axis.bar_label(drawn, [f" ×{row['vs_bert']:.2f}" for row in own], fontsize=7)
    axis.set_yticks(range(len(workloads)), workloads)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.grid(axis="x", color="lightgrey", linewidth=0.5)
    axis.set_axisbelow(True)
    axis.set_xlabel("non-padding tokens per second")
    axis.set_title("throughput, with the speed-up over BertModel (sdpa, float32)", fontsize="medium")
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))  # beside the bars, which it would cover


def lines(axis, report: dict) -> None:
    """Draws time against non-padding tokens, with the GEMM lower bound."""
    rows = report["linearity"]
    looks = {
        "sequences": ("tab:blue", "o", "1 to 256 sequences of mixed lengths"),
        "fill_rate": ("tab:orange", "s", "32 × 128 tokens, fill rate 10 to 100 %"),
    }
    for series, (colour, marker, label) in looks.items():
        own = sorted((row for row in rows if row["series"] == series), key=lambda row: row["tokens"])
        axis.plot([row["tokens"] for row in own], [row["seconds"] for row in own],
                  color=colour, marker=marker, label=label)  # fmt: skip
        axis.plot([row["tokens"] for row in own], [row["lower_bound"] for row in own],
                  color=colour, linestyle=":", label="GEMM lower bound")  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.grid(color="lightgrey", linewidth=0.5)
    axis.set_xlabel("non-padding tokens in the batch")
    axis.set_ylabel("seconds per batch")
    axis.set_title("time against non-padding tokens, ours-optimised", fontsize="medium")
    axis.legend(fontsize="small")
