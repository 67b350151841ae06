"""--seeds: several runs, their mean and standard deviation, and the best of them."""

import json
import statistics
from pathlib import Path

import pytest
import yaml
from huggingface_hub import metadata_load
from safetensors.torch import load_file

import finetune_classification
from support.finetuning import assert_one_line, breaking_off, write_labels
from toolkit.finetuning.report import rank
from toolkit.publish import survey

pytestmark = pytest.mark.usefixtures("quiet_only_here", "new_accelerator")

RUN = finetune_classification.main


@pytest.fixture
def seeded(flags, tmp_path):
    """The command line of several seeds."""
    files = {
        f"{split}_file": write_labels(tmp_path / f"{split}.jsonl", labels)
        for split, labels in {"validation": [1, 0, 1, 1, 0, 0, 1, 0], "test": [0, 1, 1, 0] * 2}.items()
    }

    def make(*seeds: int, **changed) -> list[str]:
        chosen = ["--seeds", *map(str, seeds)] if seeds else []
        return [*flags(**{"max_steps": 2, "learning_rate": 1e-3, **files, **changed}), *chosen]

    return make


def report_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def assert_same_weights(*folders: Path) -> None:
    own, expected = (load_file(folder / "model.safetensors") for folder in folders)
    assert [name for name in expected if not own[name].equal(expected[name])] == []


def test_each_run_is_that_of_its_seed_alone(seeded, tmp_path, capsys):
    assert RUN(seeded(3, 1)) == 0
    said = capsys.readouterr().out
    for seed in (3, 1):
        assert RUN(seeded(output=f"alone-{seed}", seed=seed)) == 0
        assert_same_weights(tmp_path / "run" / f"seed-{seed}", tmp_path / f"alone-{seed}")
    run = tmp_path / "run"
    reports = {seed: report_of(tmp_path / f"alone-{seed}") for seed in (3, 1)}
    found = report_of(run)["seeds"]
    for split in ("validation", "test"):
        for name, each in found[split].items():
            values = [report[split][name] for report in reports.values()]
            assert each == {
                "mean": pytest.approx(sum(values) / 2),
                "sd": pytest.approx(abs(values[0] - values[1]) / 2**0.5),
            }
        assert found["runs"] == {
            str(seed): {each: report[each] for each in ("validation", "test")} for seed, report in reports.items()
        }
    best = max(
        reports, key=lambda seed: (reports[seed]["validation"]["accuracy"], -reports[seed]["validation"]["loss"])
    )
    assert found["best"] == best
    assert_same_weights(run, run / f"seed-{best}")
    assert f"the model of seed {best}" in said
    accuracy = statistics.mean(report["test"]["accuracy"] for report in reports.values())
    assert f"accuracy {accuracy:.4f} ±" in said
    assert yaml.safe_load((run / "recipe.yaml").read_text())["seeds"] == ["3", "1"]


def test_the_card_has_the_metrics_of_all_seeds_and_the_name_of_the_folder(seeded, tmp_path):
    assert RUN(seeded(0, 1)) == 0
    card = (tmp_path / "run" / "README.md").read_text()
    found = report_of(tmp_path / "run")["seeds"]
    mean = found["test"]["loss"]["mean"]
    assert f"This one, of seed {found['best']}," in card
    assert f"| test | loss | {mean:.4g} | {found['test']['loss']['sd']:.4g} |" in card
    assert 'from_pretrained("run"' in card
    assert metadata_load(tmp_path / "run" / "README.md")["model-index"][0]["name"] == "run"


def test_the_runs_of_single_seeds_are_not_pushed(seeded, tmp_path):
    assert RUN(seeded(0, 1)) == 0
    listing = survey(tmp_path / "run", "user/name")
    assert "model.safetensors" in listing.files
    assert not any(name.startswith("seed-") for name in listing.files)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_seeds_resume_where_they_broke_off(after, seeded, tmp_path, monkeypatch):
    assert RUN(seeded(0, 1, output="whole")) == 0
    with breaking_off(monkeypatch, after):
        assert RUN(seeded(0, 1, output="broken", save_steps=1)) == 130
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    with breaking_off(monkeypatch, 4 - after) as updates:
        assert RUN([*seeded(0, 1, output="broken", save_steps=1), "--resume"]) == 0
    assert len(updates) == 4 - after
    for folder in (".", "seed-0", "seed-1"):
        assert_same_weights(tmp_path / "broken" / folder, tmp_path / "whole" / folder)
    assert report_of(tmp_path / "broken")["seeds"] == report_of(tmp_path / "whole")["seeds"]


def test_seeds_can_be_added_without_checkpoints(seeded, tmp_path, monkeypatch):
    assert RUN(seeded(0, 1, keep_checkpoints=0)) == 0
    with breaking_off(monkeypatch, 2) as updates:
        assert RUN([*seeded(0, 1, 2, keep_checkpoints=0), "--resume"]) == 0
    assert len(updates) == 2
    assert report_of(tmp_path / "run")["seeds"]["runs"].keys() == {"0", "1", "2"}


def test_seeds_are_not_added_to_those_of_other_data_or_flags(seeded, tmp_path, capsys):
    assert RUN(seeded(0, 1)) == 0
    capsys.readouterr()
    before = (tmp_path / "run" / "metrics.json").read_text()
    argv = [*seeded(0, 1, 2, learning_rate=1e-4), "--resume"]
    assert_one_line(lambda: RUN(argv), "--learning_rate was 0.001 and is 0.0001", capsys)
    write_labels(tmp_path / "train.jsonl", [0, 1] * 4)
    argv = [*seeded(0, 1, 2, train_file=tmp_path / "train.jsonl"), "--resume"]
    assert RUN(argv) == 2
    assert "the train rows" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.json").read_text() == before


def test_a_fraction_that_is_held_out_is_the_same_for_all_seeds(seeded, tmp_path):
    assert RUN(seeded(0, 1, validation_file=None, validation_fraction=0.5)) == 0
    rows = [(tmp_path / "run" / f"seed-{seed}" / "predictions_validation.jsonl").read_text() for seed in (0, 1)]
    places = [[json.loads(line)["place"] for line in text.splitlines()] for text in rows]
    assert places[0] == places[1]
    assert len(places[0]) == 4


def test_a_dry_run_of_seeds_writes_nothing(seeded, tmp_path, capsys):
    assert RUN([*seeded(0, 1), "--dry_run"]) == 0
    assert not (tmp_path / "run").exists()
    assert "Nothing was written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seeds", "changed", "message"),
    [
        ((0,), {}, "--seeds is 0; expected two or more numbers"),
        ((1, 1), {}, "--seeds is 1 1; expected two or more numbers, each once"),
        ((1, "x"), {}, "--seeds is 1 x; expected"),
        ((1, 2**32), {}, f"--seeds is 1 {2**32}; expected"),
        ((0, 1), {"seed": 4}, "--seeds and --seed are both given"),
        ((0, 1), {"validation_file": None}, "--seeds is 0 1 without --validation_file"),
    ],
)
def test_seeds_that_are_refused(seeds, changed, message, seeded, capsys):
    assert_one_line(lambda: RUN(seeded(*seeds, **changed)), message, capsys)


@pytest.mark.parametrize(("resume", "message"), [(False, "is not empty"), (True, "holds no runs of several seeds")])
def test_a_folder_with_something_else_is_not_written(resume, message, seeded, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    argv = [*seeded(0, 1), *(["--resume"] if resume else [])]
    assert_one_line(lambda: RUN(argv), message, capsys)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_the_best_has_the_highest_metric_and_then_the_lowest_loss():
    values = [(0.5, 1.0), (0.7, 2.0), (0.7, 1.5), (None, 0.1), (float("nan"), 0.0)]
    assert max(values, key=lambda each: rank(*each, True)) == (0.7, 1.5)
    assert max(values, key=lambda each: rank(*each, False)) == (0.5, 1.0)
