"""toolkit.finetuning.report and toolkit.confusion_matrix: the metrics and the pictures of a run."""

import math
import sys

import numpy as np
import pytest
from matplotlib import image, pyplot
from matplotlib.figure import Figure

from toolkit import pictures
from toolkit.confusion_matrix import plot_confusion
from toolkit.finetuning.checkpoints import Progress
from toolkit.finetuning.report import (
    MOST_PANELS,
    checkpoint_in_words,
    headline,
    plot_curves,
)
from toolkit.finetuning.task_settings import SEQ2SEQ_METRICS, ClassificationSettings
from toolkit.metrics import RANGES, main_metrics, metric_range

pytestmark = pytest.mark.usefixtures("quiet_only_here")

HISTORY = [
    {"step": 10, "epoch": 0.5, "loss": 0.9, "learning_rate": 2e-5, "tokens_per_second": 1000.0},
    {"step": 20, "epoch": 1.0, "loss": 0.5, "learning_rate": 1e-5, "tokens_per_second": 3000.0},
    {"step": 20, "epoch": 1.0, "validation": {"loss": 0.6, "accuracy": 0.75}},
    {"step": 1500, "epoch": 2.25, "loss": 0.4, "learning_rate": 0.0, "tokens_per_second": 2000.0},
]


def test_the_sentence_on_the_delivered_step():
    progress = Progress(step=1500, history=HISTORY)
    expected = "The weights are those of the last step, 1,500, because there was no evaluation before."
    assert checkpoint_in_words(progress, "accuracy") == expected
    progress = Progress(step=1500, history=HISTORY, best_checkpoint="step-00000020-epoch-1", best=0.75)
    expected = "The weights are those of step 20 (epoch 1), which had the best validation accuracy, 0.75."
    assert checkpoint_in_words(progress, "accuracy") == expected
    progress = Progress(step=1500, best_checkpoint="step-00001020", best=math.nan)
    expected = "The weights are those of step 1,020, which had the best validation pearson, undefined."
    assert checkpoint_in_words(progress, "pearson") == expected


# -------------------------------------------------------------------------------------------------------------- curves


@pytest.fixture
def axes(monkeypatch):
    """Returns the axes of the figure that was drawn last."""
    figures, real = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (figures.append(figure), real(figure, path)))
    return lambda: figures[-1].axes


def lines(axis) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): [(float(x), float(y)) for x, y in line.get_xydata()] for line in axis.lines}


def titles(axes) -> list[str]:
    return [axis.get_title(loc="left") for axis in axes]


def evaluations(*values: dict) -> list[dict]:
    return [{"step": 10 * i, "epoch": i, "validation": each} for i, each in enumerate(values, 1)]


def test_the_picture_has_both_losses_each_metric_and_in_the_last_panel_the_learning_rate(tmp_path, axes):
    later = {"step": 1500, "epoch": 2.25, "validation": {"loss": 0.55, "accuracy": 0.8, "f1": math.nan}}
    plot_curves(tmp_path / "curves.png", [*HISTORY, later], ["accuracy", "f1", "absent"])
    assert titles(axes()) == ["loss", "accuracy", "f1", "learning rate"]
    loss, accuracy, _, rate = axes()
    assert lines(loss) == {
        "training": [(10, 0.9), (20, 0.5), (1500, 0.4)],
        "validation": [(20, 0.6), (1500, 0.55)],
    }
    assert next(iter(lines(rate).values())) == [(10, 2e-5), (20, 1e-5), (1500, 0)]
    assert next(iter(lines(accuracy).values())) == [(20, 0.75), (1500, 0.8)]
    assert [axis.get_title(loc="right") for axis in axes()] == ["last: 0.55", "last: 0.8", "last: undefined", ""]
    assert [axis.get_xlabel() for axis in axes()] == ["", "", "step", "step"]
    assert len({axis.get_xlim() for axis in axes()}) == 1


@pytest.mark.parametrize("count", range(8))
def test_the_picture_has_two_columns_and_up_to_three_rows(count, tmp_path, axes):
    """The first metrics are drawn; those without a value need no room. No panel is empty."""
    names = [f"metric_{i}" for i in range(count)]
    point = {"step": 10, "epoch": 1.0, "validation": dict.fromkeys(["loss", *names], 0.5)}
    plot_curves(tmp_path / "curves.png", [*HISTORY[:1], point], ["absent", *names])
    expected = ["loss", *names][:MOST_PANELS]
    assert titles(axes()) == expected + ["learning rate"] * (len(expected) % 2)
    assert MOST_PANELS == 6
    places = [axis.get_subplotspec() for axis in axes()]
    assert {(place.rowspan.start, place.colspan.start) for place in places} == {
        (row, column) for row in range(len(places) // 2) for column in range(2)
    }


TYPES = ["DATE", "ORG", "PER", "LOC", "GPE", "TIME", "MONEY", "EVENT", "LAW", "LANGUAGE", "NORP", "PRODUCT"]
ENTITIES = {f"{name}_{measure}": 0.5 for name in TYPES for measure in ("precision", "recall", "f1", "number")}


@pytest.mark.parametrize(
    ("names", "first", "main"),
    [
        (["loss", "precision", "recall", "f1", "accuracy", *ENTITIES], "f1", ["f1", "precision", "recall", "accuracy"]),
        (["loss", "exact_match", "f1", "has_answer_f1", "no_answer_f1", "null_threshold"], "f1", ["f1", "exact_match"]),
        (["rouge1", "loss", "perplexity"], "loss", ["rouge1", "perplexity"]),
        ([], "f1", []),
    ],
)
def test_the_main_metrics_are_of_the_whole_set_the_selecting_one_first(names, first, main):
    assert main_metrics(dict.fromkeys(names, 0.5), first) == main


def test_every_metric_that_can_select_the_best_model_has_a_range():
    required = {"model": "m", "output": "o", "dataset": "d"}
    problems = ("single_label", "multi_label", "regression")
    classification = {name for each in problems for name in ClassificationSettings(**required, problem=each).metrics}
    seq2seq = {value for values in SEQ2SEQ_METRICS.values() for value in values}
    assert classification | seq2seq | {"precision", "recall", "exact_match", "next_sentence_accuracy"} <= RANGES.keys()


@pytest.mark.parametrize(
    ("name", "task", "values", "bounds"),
    [
        ("accuracy", "text-classification", [0.9, 1.0], (0, 1)),
        ("accuracy", "text-classification", [0.0, 0.02], (0, 1)),
        ("rougeLsum", "text2text-generation", [0.01, 0.99], (0, 1)),
        ("matthews_correlation", "text-classification", [-0.99, 0.99], (-1, 1)),
        ("pearson", "text-classification", [0.9], (-1, 1)),
        ("f1", "token-classification", [0.99], (0, 1)),
        ("f1", "question-answering", [50.0, 99.0], (0, 100)),
        ("exact_match", "question-answering", [0.0, 100.0], (0, 100)),
        ("bleu", "text2text-generation", [0.1, 35.0], (0, 100)),
        ("chrf", "text2text-generation", [99.0, math.nan], (0, 100)),
        ("token_error_rate", "text2text-generation", [0.01, 1.7], (0, math.inf)),
        ("item_error_rate", "text2text-generation", [1.0, 0.5], (0, 1)),
        ("perplexity", "fill-mask", [1.5, 12.0], (1, math.inf)),
        ("perplexity", "fill-mask", [30522.0, 12.0], (1, math.inf)),
        ("next_sentence_accuracy", "fill-mask", [0.5, 0.98], (0, 1)),
    ],
)
def test_axes_follow_the_values_within_the_range_of_the_metric(name, task, values, bounds, tmp_path, axes, recwarn):
    assert metric_range(name, task) == bounds
    plot_curves(tmp_path / "curves.png", evaluations(*({"loss": 0.01, name: value} for value in values)), [name], task)
    loss, metric = axes()
    low, high = metric.get_ylim()
    assert bounds[0] <= low < high <= bounds[1]
    assert loss.get_ylim()[0] >= 0
    drawn = [value for value in values if math.isfinite(value)]
    assert low < min(drawn) or low == min(drawn) == bounds[0]
    assert high > max(drawn) or high == max(drawn) == bounds[1]
    assert [str(warning.message) for warning in recwarn] == []


def test_a_small_change_is_seen_and_noise_is_not_magnified(tmp_path, axes):
    values = evaluations({"accuracy": 0.912, "f1": 0.5}, {"accuracy": 0.913, "f1": 0.8})
    plot_curves(tmp_path / "curves.png", values, ["accuracy", "f1"])
    _, accuracy, f1, _ = axes()
    assert np.ptp(accuracy.get_ylim()) == pytest.approx(0.0913)
    assert np.ptp(f1.get_ylim()) == pytest.approx(0.36)


def test_values_on_another_scale_than_expected_are_drawn(tmp_path, axes):
    plot_curves(tmp_path / "curves.png", evaluations({"f1": 93.0}, {"f1": 94.0}), ["f1"])
    low, high = axes()[1].get_ylim()
    assert 80 < low < 93
    assert high > 94


def test_a_perplexity_that_falls_far_is_drawn_on_a_logarithmic_scale(tmp_path, axes):
    names = ["perplexity", "mean_squared_error"]
    plot_curves(tmp_path / "curves.png", evaluations(*(dict.fromkeys(names, value) for value in (3e4, 12.0))), names)
    assert [axis.get_yscale() for axis in axes()[1:3]] == ["log", "linear"]
    plot_curves(tmp_path / "curves.png", evaluations({"perplexity": 30.0}, {"perplexity": 12.0}), names)
    assert axes()[1].get_yscale() == "linear"


def test_the_background_is_white_whatever_the_users_style(tmp_path):
    with pyplot.style.context("dark_background"):
        plot_curves(tmp_path / "curves.png", HISTORY, ["accuracy"])
    pixels = image.imread(tmp_path / "curves.png")
    assert pixels[0, 0].tolist() == pixels[-1, -1].tolist() == [1, 1, 1, 1]
    height, width, _ = pixels.shape
    assert pixels[height // 3, width // 4, :3].min() > 0.8


def test_details_of_each_label_are_not_in_the_headline():
    metrics = {"f1": 0.5, "DATE_precision": 0.1, "DATE_recall": 0.2, "DATE_f1": 0.3, "DATE_number": 4, "precision": 0.6}
    assert headline(metrics) == {"f1": 0.5, "DATE_f1": 0.3, "precision": 0.6}
    assert headline({}) == {}


def test_nothing_of_the_picture_is_cut_off(tmp_path, axes):
    evaluation = {
        "step": 1500,
        "epoch": 3,
        "validation": {"perplexity": 30522.123456, "a_metric_of_a_long_name": -1e-9},
    }
    plot_curves(tmp_path / "curves.png", [*HISTORY, evaluation], ["perplexity", "a_metric_of_a_long_name"])
    figure = axes()[0].figure
    box = figure.get_tightbbox()
    assert min(box.min) >= 0
    assert (box.max <= figure.get_size_inches()).all()


@pytest.mark.parametrize(
    "history",
    [
        [],
        HISTORY[:1],
        HISTORY[:2],
        HISTORY[2:3],
        [{"step": 0, "epoch": 0, "validation": {"loss": 0.0, "accuracy": 0.5}}],
        [{"step": 1, "epoch": 1, "loss": math.nan, "learning_rate": math.inf, "tokens_per_second": 0}],
        [{"step": 1, "epoch": 1, "validation": {"accuracy": math.nan}}],
        [{"step": 1, "epoch": 1, "validation": {"loss": math.inf, "accuracy": -math.inf}}],
        [{"step": 1, "epoch": 1, "loss": 1.0}],
    ],
)
def test_histories_of_little_are_drawn_without_a_warning(history, tmp_path, axes, recwarn):
    plot_curves(tmp_path / "curves.png", history, ["accuracy"])
    assert len(axes()) == 2
    assert image.imread(tmp_path / "curves.png").shape[0] > 400
    assert [str(warning.message) for warning in recwarn] == []
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_many_points_are_smoothed(tmp_path, axes):
    history = [{"step": i, "epoch": 1, "loss": float(i % 2), "learning_rate": 1e-5} for i in range(1, 501)]
    plot_curves(tmp_path / "curves.png", history, [])
    drawn = lines(axes()[0])
    assert [y for _, y in drawn["training"]] == [i % 2 for i in range(1, 501)]
    assert all(0.4 < y < 0.6 for _, y in drawn["training, smoothed"][100:])


def test_without_matplotlib_a_line_says_so_once(tmp_path, monkeypatch, capsys):
    pictures.has_matplotlib.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for _ in range(2):
        plot_curves(tmp_path / "curves.png", HISTORY, ["accuracy"])
        plot_confusion(tmp_path / "confusion_matrix.png", ["a", "b"], ["a", "b"], ["a", "a"], "validation")
    pictures.has_matplotlib.cache_clear()
    assert capsys.readouterr().err.count("matplotlib is not installed") == 1
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- confusion matrix


@pytest.fixture
def confusion(tmp_path, axes):
    """Draws a confusion matrix, and returns its axes."""

    def draw(labels, references, predictions, title="validation"):
        plot_confusion(tmp_path / "confusion_matrix.png", labels, references, predictions, title)
        assert [path.name for path in tmp_path.iterdir()] == ["confusion_matrix.png"]
        return axes()[0]

    return draw


def test_rows_of_a_confusion_matrix_are_the_true_labels(confusion):
    """Colours are shares of the row; a label that never occurs has none."""
    axis = confusion(["no", "yes", "maybe"], ["no"] * 4 + ["yes"], ["no"] * 3 + ["yes", "maybe"])
    assert axis.images[0].get_array().tolist() == [[0.75, 0.25, 0], [0, 0, 1], [0, 0, 0]]
    assert axis.images[0].get_clim() == (0, 1)
    assert [text.get_text() for text in axis.texts] == ["3", "1", "0", "0", "0", "1", "0", "0", "0"]
    for labels in (axis.get_yticklabels(), axis.get_xticklabels()):
        assert [label.get_text() for label in labels] == ["no", "yes", "maybe"]
    assert (axis.get_ylabel(), axis.get_xlabel(), axis.get_title("left")) == (
        "True label",
        "Predicted label",
        "validation",
    )


@pytest.mark.parametrize(("count", "written"), [(15, 225), (16, 0), (60, 0)])
def test_counts_are_written_for_few_labels(count, written, confusion, recwarn):
    labels = [f"label {i}" for i in range(count)]
    axis = confusion(labels, labels, labels[:1] * count)
    assert (len(axis.texts), len(axis.get_yticklabels()), len(recwarn)) == (written, count, 0)


@pytest.mark.parametrize(("count", "items"), [(61, 1), (2, 0), (0, 0)])
def test_no_confusion_matrix_of_many_labels_or_of_no_items(count, items, tmp_path):
    plot_confusion(tmp_path / "confusion_matrix.png", [f"{i}" for i in range(count)], ["0"] * items, ["0"] * items, "")
    assert list(tmp_path.iterdir()) == []


def test_long_labels_are_shortened_in_the_middle_and_no_formula(confusion, recwarn):
    labels = ["customer_service_complaint_1", "customer_service_complaint_2", "$x^2$ \n y", "日本"]
    axis = confusion(labels, labels, labels, title="$validation$")
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "customer_s…mplaint_1",
        "customer_s…mplaint_2",
        r"\$x^2\$ y",
        "日本",
    ]
    assert len(recwarn) == 0


def test_a_confusion_matrix_is_drawn_on_white(tmp_path):
    with pyplot.style.context("dark_background"):
        plot_confusion(tmp_path / "x.png", ["a", "b"], ["a", "b"], ["a", "b"], "validation")
    pixels = image.imread(tmp_path / "x.png")
    assert pixels[0, 0].tolist() == pixels[-1, -1].tolist() == [1, 1, 1, 1]
