"""A saved model opens by the Auto classes: by the code in its folder, and by the package; also models of classes that a
user derived. `support/remote_code.py` has the checks that need a process without the package."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import modeling_scratchbert
from modeling_scratchbert import AUTO_MAP, ScratchBertConfig
from support import remote_code, user_models
from support.checkpoint_kinds import assert_same_outputs, config_json, logged_warnings, write_bert, write_hub_cache
from support.folders import CODE, DATA, ROOT
from support.models import BERTS, OURS, SPECIAL, TINY, random_scratchbert
from support.processes import run_python

EARLIER_VERSIONS = ("0.1.0", "fa82c55")
# The name of the class that each Auto class opens, but for a seq2seq model.
CLASS_NAMES = {auto: path.split(".")[1] for auto, path in AUTO_MAP.items() if auto != "AutoConfig"}
# Class of the saved model, Auto class, and the name of the class that this opens.
OPENINGS = [
    *((head, auto, name) for head in BERTS for auto, name in CLASS_NAMES.items() if auto != "AutoModelForSeq2SeqLM"),
    ("Seq2SeqModel", "AutoModel", "ScratchBertSeq2SeqModel"),
    ("ForConditionalGeneration", "AutoModelForSeq2SeqLM", "ScratchBertForConditionalGeneration"),
]


def test_every_class_has_the_auto_classes_of_its_bert():
    public = {name for name in modeling_scratchbert.__all__ if name.endswith("Model") or "BertFor" in name}
    # AutoModel opens the one by way of ScratchBertModel; the other is abstract.
    assert set(CLASS_NAMES.values()) == public - {"ScratchBertSeq2SeqModel", "ScratchBertPreTrainedModel"}
    for name in dir(transformers):
        mapping = getattr(getattr(transformers, name), "_model_mapping", None) if name.startswith("AutoModel") else None
        bert = mapping[transformers.BertConfig].__name__ if transformers.BertConfig in (mapping or ()) else None
        assert f"Scratch{bert}" not in public or CLASS_NAMES[name] == f"Scratch{bert}"


# --------------------------------------------------------------------------------------------- without the package


def prepare(folder: Path) -> None:
    """Write what `remote_code.py` reads."""
    batch = {"input_ids": torch.randint(5, 90, (2, 6)), "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}
    outputs = {}
    for head in OURS:
        model = random_scratchbert(head, **SPECIAL)
        model.save_pretrained(folder / "saved" / head)
        outputs[head] = remote_code.outputs_of(model, batch)
    ScratchBertConfig(**TINY).save_pretrained(folder / "configuration")
    write_bert(folder / "bert")
    for version in EARLIER_VERSIONS:
        shutil.unpack_archive(DATA / f"scratchbert-{version}.zip", folder / "earlier" / version)
    write_hub_cache(folder / "home" / "hub", "someone/scratch.bert-1", folder / "saved" / "ForMaskedLM")
    given = {"auto_map": AUTO_MAP, "code": sorted(CODE), "openings": OPENINGS, "batch": batch, "outputs": outputs}
    torch.save(given, folder / "given.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("remote_code")
    prepare(folder)
    run_python(remote_code.__file__, folder, cwd=folder, HF_HOME=str(folder / "home"), PYTHONPATH=str(ROOT))
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("check", [check.__name__ for check in remote_code.CHECKS])
def test_without_the_package(results, check):
    assert results[check] is None, results[check]


# ------------------------------------------------------------------------------------------------ with the package


@pytest.mark.parametrize("trust", [None, True, False])
@pytest.mark.parametrize(("head", "auto", "name"), [each for each in OPENINGS if each[0] not in BERTS[2:]])
def test_the_package_opens_saved_models(tmp_path, head, auto, name, trust):
    model, auto_class = random_scratchbert(head), getattr(transformers, auto)
    model.save_pretrained(tmp_path)
    with logged_warnings() as warnings:
        config = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)
        opened, info = auto_class.from_pretrained(tmp_path, trust_remote_code=trust, output_loading_info=True)
    assert type(config) is ScratchBertConfig
    assert type(auto_class.from_config(config)) is type(opened) is getattr(modeling_scratchbert, name)
    if type(opened) is type(model):
        assert info == remote_code.NOTHING
        assert not warnings
        assert_same_outputs(opened, model)
    else:
        assert_same_outputs(opened, model, only="hidden_states")


@pytest.mark.parametrize("version", EARLIER_VERSIONS)
def test_the_package_opens_models_of_earlier_versions(tmp_path, version):
    folder = tmp_path / "earlier"
    shutil.unpack_archive(DATA / f"scratchbert-{version}.zip", folder)
    load = transformers.AutoModelForPreTraining.from_pretrained
    model, info = load(folder, output_loading_info=True)
    assert type(model) is modeling_scratchbert.ScratchBertForPreTraining
    assert info == remote_code.NOTHING
    remote_code.assert_recorded_outputs(folder, model)
    model.save_pretrained(tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").glob("*.py")} == CODE
    again = load(tmp_path / "again", verify=True)
    remote_code.assert_recorded_outputs(folder, again)
    remote_code.assert_recorded_outputs(folder, again.optimize_for_inference())
    if (folder / "probe.json").exists():
        load(folder, verify=True)


def test_the_package_can_be_imported_again():
    importlib.reload(modeling_scratchbert)
    assert type(transformers.AutoConfig.for_model("scratchbert")) is ScratchBertConfig


# ----------------------------------------------------------------------------------------------- derived classes


@pytest.mark.parametrize("is_registered", [False, True])
@pytest.mark.parametrize(
    ("model_class", "auto", "config"),
    [
        (user_models.TanhClassifier, "AutoModelForSequenceClassification", ScratchBertConfig(**TINY)),
        (user_models.ScaledModel, "AutoModel", user_models.ScaledConfig(**TINY, scale=3.5)),
    ],
    ids=["model", "model and configuration"],
)
def test_the_auto_classes_open_a_derived_class_if_it_is_registered(
    tmp_path, monkeypatch, model_class, auto, config, is_registered
):
    auto_map = {"AutoConfig": AUTO_MAP["AutoConfig"]} if type(config) is ScratchBertConfig else {}
    for derived in (model_class, type(config)):
        monkeypatch.setattr(derived, "_auto_class", None)
    if is_registered:
        model_class.register_for_auto_class(auto)
        auto_map[auto] = f"user_models.{model_class.__name__}"
    if is_registered and type(config) is not ScratchBertConfig:
        type(config).register_for_auto_class()
        auto_map["AutoConfig"] = "user_models.ScaledConfig"
    model = model_class(config).eval()
    with logged_warnings() as warnings:
        model.save_pretrained(tmp_path / "saved")
    assert any("register_for_auto_class" in warning for warning in warnings) != is_registered
    assert config_json(tmp_path / "saved")["auto_map"] == auto_map
    code = {path.name for path in (tmp_path / "saved").glob("*.py")}
    assert code == (CODE | {"user_models.py"} if is_registered else CODE)

    again, info = model_class.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert info == remote_code.NOTHING
    assert type(again.config) is type(config)
    assert_same_outputs(again, model)
    again.save_pretrained(tmp_path / "again")
    assert config_json(tmp_path / "again")["auto_map"] == auto_map
    # Its parent is saved as before.
    model_class.__base__(ScratchBertConfig(**TINY)).save_pretrained(tmp_path / "parent")
    assert config_json(tmp_path / "parent")["auto_map"] == AUTO_MAP


def test_a_derived_class_of_a_notebook_is_saved_without_its_code(tmp_path, monkeypatch):
    monkeypatch.setattr(user_models.TanhClassifier, "__module__", "__main__")
    monkeypatch.setattr(user_models.TanhClassifier, "_auto_class", "AutoModelForSequenceClassification")
    model = user_models.TanhClassifier(ScratchBertConfig(**TINY)).eval()
    model.save_pretrained(tmp_path)
    assert "AutoModelForSequenceClassification" not in config_json(tmp_path)["auto_map"]
    assert_same_outputs(user_models.TanhClassifier.from_pretrained(tmp_path), model)
