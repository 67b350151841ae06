"""Between the code that a saved model carries and the installed package: what works across, the error if the package is
hidden or of another version, where the code comes from that is saved, and what an import does.

What works without the package is in `test_hub_form`."""

import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import modeling_scratchbert
from modeling_scratchbert.installed import INTERFACE_VERSION
from support.checkpoint_kinds import assert_same_outputs, outputs, write_bert, write_two_berts
from support.models import SPECIAL, TINY, random_bert, random_encoder_decoder, random_scratchbert

PACKAGE = Path(modeling_scratchbert.__file__).parent
CODE = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}


def copied_class(folder, name="ForMaskedLM"):
    """A model class of the code in `folder`, as the Auto classes open it in a process without the package."""
    found = get_class_from_dynamic_module(f"modeling_scratchbert.ScratchBert{name}", str(folder))
    assert found.__module__.startswith("transformers_modules.")
    return found


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


@pytest.fixture
def model():
    return random_scratchbert("ForMaskedLM")


@pytest.fixture
def saved(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def forget_the_package(monkeypatch):
    """A function after which the next import of the package looks for it again."""

    def package_modules():
        return [name for name in sys.modules if name.partition(".")[0] == "modeling_scratchbert"]

    yield lambda: [monkeypatch.delitem(sys.modules, name) for name in package_modules()]
    for name in package_modules():
        del sys.modules[name]  # of the test's own package; afterwards the others come back


# ---------------------------------------------------------------------------------- a copy, with the package installed


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), ("int8", 1.0)], ids=str)
def test_a_copy_is_optimised(saved, model, dtype, tolerance):
    copy = copied_class(saved).from_pretrained(saved)
    assert copy.optimize_for_inference(dtype) is copy
    assert any(type(module).__module__.startswith("modeling_scratchbert.cpu") for module in copy.modules())
    assert_same_outputs(copy, model, "logits", tolerance)
    assert torch.equal(outputs(copy)["logits"], outputs(model.optimize_for_inference(dtype))["logits"])
    for operation in (copy.state_dict, copy.train, lambda: copy.save_pretrained(saved), lambda: copy.to(torch.float64)):
        with pytest.raises(RuntimeError, match="optimised for inference"):
            operation()


def test_a_copy_writes_a_calibration_that_the_package_reads_and_the_reverse(saved, model, tmp_path):
    first = copied_class(saved).from_pretrained(saved).optimize_for_inference("int8")
    for i, second in enumerate((model, copied_class(saved).from_pretrained(saved))):
        first.save_calibration(tmp_path / str(i))
        second.optimize_for_inference("int8", tmp_path / str(i))
        assert_same_outputs(first, second, tolerance=0)
        first = second


def test_a_copy_loads_and_saves_a_bert(saved, tmp_path):
    bert = random_bert("ForMaskedLM", seed=3)
    write_bert(tmp_path / "bert", bert, layer_norm="gamma")
    copied = copied_class(saved)
    copy, info = copied.from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert type(copy) is copied
    assert not info["missing_keys"]
    assert_same_outputs(copy, bert)
    copy.save_as_bert(tmp_path / "again")
    again, info = transformers.BertForMaskedLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same_outputs(again, bert, tolerance=0)
    assert copied.config_class.from_bert(bert.config).hidden_size == bert.config.hidden_size
    write_bert(tmp_path / "roberta", fields={"model_type": "roberta"})
    with pytest.raises(ValueError, match="'roberta'"):
        copied.from_pretrained(tmp_path / "roberta")


def test_a_copy_starts_a_seq2seq_model_from_a_bert_and_from_two(saved, tmp_path):
    bert = random_bert("Model")
    write_bert(tmp_path / "bert", bert)
    copied = copied_class(saved, "ForConditionalGeneration")
    copy = copied.from_bert(tmp_path / "bert", **SPECIAL)
    assert type(copy) is copied
    assert type(copy.config) is copied.config_class
    assert_same_outputs(copy.get_encoder(), bert, "last_hidden_state")
    both = random_encoder_decoder()
    write_two_berts(tmp_path / "two", both)
    assert_same_outputs(copied.from_pretrained(tmp_path / "two"), both, "logits")


def test_a_copy_is_saved_with_a_probe_and_verified(saved, model, tmp_path):
    copied = copied_class(saved)
    copied.from_pretrained(saved, verify=True).save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "probe.json").read_text() == (saved / "probe.json").read_text()
    model.__class__.from_pretrained(tmp_path / "again", verify=True)
    torch.manual_seed(1)
    copied(copied.config_class(**TINY)).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "again" / "model.safetensors")
    with pytest.raises(ValueError, match=r"differ from probe\.json"):
        copied.from_pretrained(tmp_path / "again", verify=True)


def test_peft_finds_the_layers_of_a_copy(saved):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(copied_class(saved).from_pretrained(saved), peft.LoraConfig())
    names = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert names == {"query", "value"}


# ----------------------------------------------------------------------------------------- hidden, or another version


def finders_of_folders() -> list:
    """`sys.meta_path` without the finders of editable installations, which ignore `sys.path`."""
    return [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]


def message_of(function, *arguments) -> str:
    with pytest.raises(ImportError) as raised:
        function(*arguments)
    assert type(raised.value) is ImportError
    return str(raised.value)


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (INTERFACE_VERSION - 1, "load the model without trust_remote_code, and save it again"),
        (INTERFACE_VERSION + 1, "pip install -c constraints.txt"),
    ],
    ids=["older folder", "newer folder"],
)
def test_a_folder_and_a_package_of_other_versions(saved, model, tmp_path, version, advice):
    change(saved / "installed.py", f"INTERFACE_VERSION = {INTERFACE_VERSION}", f"INTERFACE_VERSION = {version}")
    write_bert(tmp_path / "bert")
    copied = copied_class(saved)
    copy = copied.from_pretrained(saved)
    message = f"interface version {INTERFACE_VERSION}; the code of this model expects {version}"
    operations = [
        (copy.optimize_for_inference,),
        (copy.save_as_bert, tmp_path / "out"),
        (copied.from_pretrained, tmp_path / "bert"),
    ]
    for operation in operations:
        found = message_of(*operation)
        assert message in found
        assert advice in found
    # The rest works, as without the package.
    assert_same_outputs(copy, model, tolerance=0)
    copy.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "probe.json").exists()
    assert {path.name for path in (tmp_path / "again").glob("*.py")} == CODE
    # The advice for an older folder: the package opens it, and saves its own code.
    type(model).from_pretrained(tmp_path / "again").save_pretrained(tmp_path / "again")
    copied_class(tmp_path / "again").from_pretrained(tmp_path / "again", verify=True).optimize_for_inference()


def test_a_package_that_is_broken_does_not_prevent_saving(saved, model, tmp_path, monkeypatch, forget_the_package):
    copy = copied_class(saved).from_pretrained(saved)
    (tmp_path / "site" / "modeling_scratchbert").mkdir(parents=True)
    (tmp_path / "site" / "modeling_scratchbert" / "__init__.py").write_text("raise AttributeError('no such thing')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "meta_path", finders_of_folders())
    forget_the_package()
    copy.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "probe.json").exists()
    assert_same_outputs(copied_class(tmp_path / "again").from_pretrained(tmp_path / "again"), model, tolerance=0)


def test_a_folder_of_a_saved_model_with_the_name_of_the_package(saved, monkeypatch, forget_the_package):
    copy = copied_class(saved).from_pretrained(saved)
    saved.rename(saved.parent / "modeling_scratchbert")
    monkeypatch.syspath_prepend(saved.parent)
    monkeypatch.setattr(sys, "meta_path", finders_of_folders())
    monkeypatch.setattr(sys, "path", [str(saved.parent), *(p for p in sys.path if not Path(p, PACKAGE.name).exists())])
    forget_the_package()
    message = message_of(copy.optimize_for_inference)
    assert "part of a saved model" in message
    assert "pip install -c constraints.txt" in message


def test_a_package_without_the_seam(saved, tmp_path, monkeypatch, forget_the_package):
    """As version 0.1.0, which had none."""
    copy = copied_class(saved).from_pretrained(saved)
    (tmp_path / "site" / "modeling_scratchbert").mkdir(parents=True)
    (tmp_path / "site" / "modeling_scratchbert" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "meta_path", finders_of_folders())
    forget_the_package()
    message = message_of(copy.optimize_for_inference)
    assert "interface version 0" in message
    assert "pip install -c constraints.txt" in message


def test_a_saved_model_that_hides_the_package(saved, monkeypatch, forget_the_package):
    copy = copied_class(saved).from_pretrained(saved)
    monkeypatch.chdir(saved)
    monkeypatch.syspath_prepend("")
    forget_the_package()
    message = message_of(copy.optimize_for_inference)
    assert str(saved / "modeling_scratchbert.py") in message
    assert "Start Python in another folder" in message


def test_one_error_without_the_package(saved, monkeypatch, forget_the_package):
    copy = copied_class(saved).from_pretrained(saved)
    monkeypatch.setattr(sys, "meta_path", finders_of_folders())
    monkeypatch.setattr(sys, "path", [each for each in sys.path if not Path(each, "modeling_scratchbert").exists()])
    forget_the_package()
    message = message_of(copy.optimize_for_inference)
    assert message.startswith("modeling_scratchbert.cpu.optimization is not in the folder of a saved model")
    assert message.endswith("`python -m pip install -c constraints.txt -e .`.")


# ------------------------------------------------------------------------------------------- processes of their own


def run(code: str, *arguments, cwd, path=None) -> dict:
    """The dictionary that `code` prints as JSON in its last line. `path` is searched first for modules."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(cwd / "modules"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


SAVE = """
import json, sys, torch
from pathlib import Path
import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig, ScratchBertForMaskedLM

sizes = dict(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
model = ScratchBertForMaskedLM(ScratchBertConfig(**sizes)).eval()
result = {"file": modeling_scratchbert.__file__}
for name, save in (("model", model.save_pretrained), ("config", model.config.save_pretrained)):
    try:
        save(name)
    except OSError as error:
        result[name] = [type(error).__name__, str(error)]
    else:
        result[name] = sorted(path.name for path in Path(name).iterdir())
model.save_as_bert("bert")
model.optimize_for_inference()(torch.tensor([[2, 7, 3]]))
print(json.dumps(result))
"""


def test_imported_from_a_zip_file_a_model_is_saved_with_its_code(tmp_path):
    """As Spark's `addPyFile` does."""
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for path in PACKAGE.rglob("*.py"):
            archive.write(path, path.relative_to(PACKAGE.parent))
    result = run(SAVE, cwd=tmp_path, path=tmp_path / "package.zip")
    assert result["file"].startswith(str(tmp_path / "package.zip"))
    assert set(result["model"]) == CODE | {"config.json", "model.safetensors", "probe.json"}
    assert set(result["config"]) == CODE | {"config.json"}
    assert all((tmp_path / "model" / name).read_bytes() == (PACKAGE / name).read_bytes() for name in CODE)


def test_installed_without_sources_a_model_is_not_saved(tmp_path):
    site = shutil.copytree(PACKAGE, tmp_path / "site" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in site.rglob("*.py"):
        py_compile.compile(str(path), cfile=str(path.with_suffix(".pyc")), doraise=True)
        path.unlink()
    result = run(SAVE, cwd=tmp_path, path=site.parent)
    assert result["file"] == str(site / "__init__.pyc")
    for name in ("model", "config"):
        kind, message = result[name]
        assert kind == "OSError"
        assert "has no source files" in message
        assert "save_as_bert()" in message
    assert not list((tmp_path / "model").iterdir())
    assert not (tmp_path / "config" / "config.json").exists()


IMPORT = """
import copyreg, json, sys, warnings
from pathlib import Path
import torch, transformers
import torch.utils._pytree
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

def registries():
    found = {
        "operators": [name for name in torch._C._dispatch_get_all_op_names() if "scratchbert" in name],
        "attention": list(ALL_ATTENTION_FUNCTIONS.keys()),
        "masks": list(ALL_MASK_ATTENTION_FUNCTIONS.keys()),
        "activations": list(ACT2FN),
        "pickling": [str(cls) for cls in copyreg.dispatch_table if "scratchbert" in str(cls)],
        "pytrees": [str(cls) for cls in torch.utils._pytree.SUPPORTED_NODES
                    if "scratchbert" in str(cls) and not issubclass(cls, ModelOutput)],  # transformers registers these
        "renaming": [str(get_checkpoint_conversion_mapping("scratchbert"))],
        "PEFT": [n for n, t in vars(peft_tables).items() if n.startswith("TRANSFORMERS") and "scratchbert" in t],
    }
    return {name: sorted(values) for name, values in found.items()}

def auto_classes():
    types = {}
    for name in dir(transformers):
        if name.startswith("AutoModel"):
            mapping = getattr(getattr(transformers, name), "_model_mapping", None)
            extra = getattr(mapping, "_extra_content", {})
            types |= {name: cls.__name__ for cls in extra.values() if "scratchbert" in cls.__module__}
    return types

result = {}
config = transformers.AutoConfig.from_pretrained("saved", trust_remote_code=True)
assert type(config).__module__.startswith("transformers_modules."), type(config).__module__
result["executed"] = sorted({
    Path(module.__file__).stem for name, module in list(sys.modules.items())
    if name.startswith("transformers_modules.saved.") and getattr(module, "__file__", None)
} - {"__init__"})
config.save_pretrained("configuration")
result["saved with the configuration"] = sorted(path.name for path in Path("configuration").glob("*.py"))
result["package imported by then"] = "modeling_scratchbert" in sys.modules

import peft.utils.constants as peft_tables  # whose import makes every `to_dict` look for the package
before = registries()
import modeling_scratchbert
after = registries()
result["registered"] = [name for name in before if before[name] != after[name]]
result["Auto classes"] = auto_classes()
result["subpackages"] = sorted(name for name in sys.modules if name.startswith("modeling_scratchbert.")
                               and name.split(".")[1] in ("bert", "cpu", "probe"))
model = transformers.AutoModel.from_pretrained("saved")
assert type(model) is modeling_scratchbert.ScratchBertModel
model(torch.tensor([[2, 7, 3]]))
after = registries()
result["registered by a forward pass"] = [name for name in before if before[name] != after[name]]
model.optimize_for_inference()
result["operators"] = registries()["operators"]
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def noted(tmp_path_factory):
    """What a process notes that opens a configuration by its code, and imports the package afterwards."""
    pytest.importorskip("peft", reason="peft is not installed")
    folder = tmp_path_factory.mktemp("import")
    random_scratchbert().save_pretrained(folder / "saved")
    return run(IMPORT, cwd=folder)


def test_a_configuration_executes_four_files_and_is_saved_with_all(noted):
    assert noted["executed"] == ["checkpoints", "configuration_scratchbert", "installed", "versions"]
    assert set(noted["saved with the configuration"]) == CODE
    assert not noted["package imported by then"]


def test_an_import_registers_the_auto_classes_and_nothing_else(noted):
    assert noted["registered"] == []
    paths = modeling_scratchbert.configuration_scratchbert.AUTO_MAP
    assert noted["Auto classes"] == {auto: path.split(".")[1] for auto, path in paths.items() if auto != "AutoConfig"}
    assert noted["subpackages"] == []


def test_the_first_optimisation_registers_the_operators(noted):
    assert set(noted["registered by a forward pass"]) <= {
        "PEFT"
    }  # whose table is needed when PEFT reads a configuration
    assert noted["operators"]
    assert all(name.startswith("scratchbert_cpu::") for name in noted["operators"])
