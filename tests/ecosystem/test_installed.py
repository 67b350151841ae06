"""Between the code in the folder of a saved model and the installed package: what works across, the error if the
package is hidden or of another version, and where the saved code comes from.

What works without the package is in `test_remote_code`."""

import py_compile
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig
from modeling_scratchbert.installed import INTERFACE_VERSION
from support.checkpoint_kinds import assert_same_outputs, outputs, write_bert, write_two_berts
from support.folders import CODE
from support.models import OURS, SPECIAL, random_bert, random_encoder_decoder, random_scratchbert
from support.processes import run_python

PACKAGE = Path(modeling_scratchbert.__file__).parent


def copied_class(folder, name="ForMaskedLM"):
    """A model class of the code in `folder`, as the Auto classes open it in a process without the package."""
    found = get_class_from_dynamic_module(f"modeling_scratchbert.ScratchBert{name}", str(folder))
    assert found.__module__.startswith("transformers_modules.")
    return found


@pytest.fixture
def model():
    return random_scratchbert("ForMaskedLM")


@pytest.fixture
def saved(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


# ---------------------------------------------------------------------------------- a copy, with the package installed


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), ("int8", 1.0)], ids=str)
def test_a_copy_is_optimised(saved, model, dtype, tolerance):
    copy = copied_class(saved).from_pretrained(saved)
    assert copy.optimize_for_inference(dtype) is copy
    assert_same_outputs(copy, model, "logits", tolerance)
    assert torch.equal(outputs(copy)["logits"], outputs(model.optimize_for_inference(dtype))["logits"])
    with pytest.raises(RuntimeError, match="save_pretrained"):
        copy.save_pretrained(saved)


def test_a_copy_loads_what_the_package_loads(saved, tmp_path):
    """Also a BERT, two BERTs as a seq2seq model, and one BERT as both parts of it."""
    bert, encoder, both = random_bert("ForMaskedLM", seed=3), random_bert("Model"), random_encoder_decoder()
    write_bert(tmp_path / "bert", bert, layer_norm="gamma")
    write_bert(tmp_path / "encoder", encoder)
    write_two_berts(tmp_path / "two", both)
    write_bert(tmp_path / "roberta", fields={"model_type": "roberta"})
    copied, copied_seq2seq = (copied_class(saved, head) for head in ("ForMaskedLM", "ForConditionalGeneration"))
    copy, info = copied.from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert type(copy) is copied
    assert not info["missing_keys"]
    assert_same_outputs(copy, bert)
    copy.save_as_bert(tmp_path / "again")
    assert_same_outputs(transformers.BertForMaskedLM.from_pretrained(tmp_path / "again"), bert, tolerance=0)
    seq2seq = copied_seq2seq.from_bert(tmp_path / "encoder", **SPECIAL)
    assert type(seq2seq) is copied_seq2seq
    assert type(seq2seq.config) is copied.config_class
    assert_same_outputs(seq2seq.get_encoder(), encoder, "last_hidden_state")
    assert_same_outputs(copied_seq2seq.from_pretrained(tmp_path / "two"), both, "logits")
    with pytest.raises(ValueError, match="roberta"):
        copied.from_pretrained(tmp_path / "roberta")


def test_peft_finds_the_layers_of_a_copy(saved):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(copied_class(saved).from_pretrained(saved), peft.LoraConfig())
    names = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert names == {"query", "value"}


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForConditionalGeneration"])
def test_each_copy_accepts_the_configuration_and_the_weights_of_the_other(head, tmp_path):
    model = random_scratchbert(head, **SPECIAL)
    model.save_pretrained(tmp_path)
    copied = copied_class(tmp_path, head)
    for model_class, config_class in ((OURS[head], copied.config_class), (copied, ScratchBertConfig)):
        config = config_class.from_pretrained(tmp_path)
        made = model_class(config)
        made.load_state_dict(model.state_dict())
        opened = model_class.from_pretrained(tmp_path, config=config, verify=True)
        for each in (made, opened):
            assert_same_outputs(each, model)
        opened.save_pretrained(tmp_path)
        assert {path.name for path in tmp_path.glob("*.py")} == CODE
    assert_same_outputs(OURS[head].from_pretrained(tmp_path), model)


# ------------------------------------------------------------------------------- hidden, broken, or another version


@pytest.fixture
def search_package(monkeypatch):
    """A function after which the package is only found in a folder."""

    def package_modules():
        return [name for name in sys.modules if name.partition(".")[0] == "modeling_scratchbert"]

    def search(folder: Path) -> None:
        # Finders of editable installations ignore `sys.path`.
        finders = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
        monkeypatch.setattr(sys, "meta_path", finders)
        others = [path for path in sys.path if not Path(path, "modeling_scratchbert").exists()]
        monkeypatch.setattr(sys, "path", [str(folder), *others])
        for name in package_modules():
            monkeypatch.delitem(sys.modules, name)

    yield search
    for name in package_modules():
        del sys.modules[name]  # monkeypatch then restores the package


def write_package(folder: Path, code: str) -> None:
    (folder / "modeling_scratchbert").mkdir()
    (folder / "modeling_scratchbert" / "__init__.py").write_text(code)


# How a folder is made in which the package is searched, and the error of what requires the package.
HIDDEN = {
    "not installed": (lambda folder, saved: None, ImportError, "-c constraints.txt"),
    "version 0.1.0": (lambda folder, saved: write_package(folder, ""), ImportError, "-c constraints.txt"),
    "broken": (lambda folder, saved: write_package(folder, "raise ValueError('broken')"), ValueError, "broken"),
    "a saved model with the name of the package": (
        lambda folder, saved: shutil.copytree(saved, folder / "modeling_scratchbert"),
        ImportError,
        "part of a saved model",
    ),
    "the folder of a saved model": (
        lambda folder, saved: shutil.copytree(saved, folder, dirs_exist_ok=True),
        ImportError,
        "another folder",
    ),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_copy_without_a_usable_package_says_what_to_do_and_is_saved(saved, model, tmp_path, search_package, kind):
    copy = copied_class(saved).from_pretrained(saved)
    make_folder, error, words = HIDDEN[kind]
    (tmp_path / "site").mkdir()
    make_folder(tmp_path / "site", saved)
    search_package(tmp_path / "site")
    with pytest.raises(error, match=words):
        copy.optimize_for_inference()
    copy.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "probe.json").exists()
    assert_same_outputs(copied_class(tmp_path / "again").from_pretrained(tmp_path / "again"), model, tolerance=0)


@pytest.mark.parametrize(
    ("version", "advice"),
    [(INTERFACE_VERSION - 1, "without trust_remote_code"), (INTERFACE_VERSION + 1, "-c constraints.txt")],
    ids=["older folder", "newer folder"],
)
def test_a_folder_and_a_package_of_other_versions(saved, model, tmp_path, version, advice):
    file = saved / "installed.py"
    file.write_text(file.read_text().replace(f"VERSION = {INTERFACE_VERSION}", f"VERSION = {version}"))
    write_bert(tmp_path / "bert")
    copied = copied_class(saved)
    copy = copied.from_pretrained(saved)
    operations = (
        copy.optimize_for_inference,
        lambda: copy.save_as_bert(tmp_path / "out"),
        lambda: copied.from_pretrained(tmp_path / "bert"),
    )
    for operation in operations:
        with pytest.raises(ImportError, match=f"{INTERFACE_VERSION}.*{version}.*{advice}"):
            operation()
    # The rest works, as without the package.
    assert_same_outputs(copy, model, tolerance=0)
    copy.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "probe.json").exists()
    assert {path.name for path in (tmp_path / "again").glob("*.py")} == CODE
    # The advice for an older folder: the package opens it, and saves its own code.
    type(model).from_pretrained(tmp_path / "again").save_pretrained(tmp_path / "again")
    copied_class(tmp_path / "again").from_pretrained(tmp_path / "again", verify=True).optimize_for_inference()


# ------------------------------------------------------------------------------------------- processes of their own


SAVE = """
import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig, ScratchBertModel

model = ScratchBertModel(ScratchBertConfig(hidden_size=24, num_hidden_layers=1, intermediate_size=64, vocab_size=9))
for name, save in ("model", model.save_pretrained), ("config", model.config.save_pretrained):
    try:
        save(name)
    except OSError as error:
        assert "save_as_bert" in str(error)
model.save_as_bert("bert")
print(modeling_scratchbert.__file__)
"""


def zipped(folder: Path) -> Path:
    """As Spark's `addPyFile` does."""
    with zipfile.ZipFile(folder / "package.zip", "w") as archive:
        for path in PACKAGE.rglob("*.py"):
            archive.write(path, path.relative_to(PACKAGE.parent))
    return folder / "package.zip"


def without_sources(folder: Path) -> Path:
    site = shutil.copytree(PACKAGE, folder / "site" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in site.rglob("*.py"):
        py_compile.compile(str(path), cfile=str(path.with_suffix(".pyc")), doraise=True)
        path.unlink()
    return site.parent


@pytest.mark.parametrize("install", [zipped, without_sources])
def test_a_model_is_saved_with_its_code_or_not_at_all(install, tmp_path):
    path = install(tmp_path)
    assert run_python("-c", SAVE, cwd=tmp_path, PYTHONPATH=str(path)).startswith(str(path))
    code = CODE if install is zipped else set()
    files = {"model": {"config.json", "model.safetensors", "probe.json"}, "config": {"config.json"}}
    for folder, others in files.items():
        found = {each.name for each in (tmp_path / folder).iterdir()}
        assert found == (code | others if code else set())
    assert all((tmp_path / "model" / name).read_bytes() == (PACKAGE / name).read_bytes() for name in code)
    assert (tmp_path / "bert" / "model.safetensors").exists()
