"""What saved models do in a process that cannot import the package.

remote_code.py FOLDER    runs CHECKS in FOLDER, which `test_remote_code` prepares

results.json is then the traceback of each check, or null if it passed.
"""

import json
import os
import shutil
import sys
import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
# Written by `test_remote_code`: auto_map, code, openings, batch and outputs.
given: dict = {}


def assert_close(actual, expected, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@torch.no_grad()
def outputs_of(model, batch: dict) -> dict[str, torch.Tensor]:
    """Return the output tensors, and the last hidden states of a model of any class."""
    if "MultipleChoice" in type(model).__name__:
        batch = {name: tensor[None] for name, tensor in batch.items()}
    if model.config.is_encoder_decoder:
        batch = {**batch, "decoder_input_ids": batch["input_ids"].flip(1)}
    outputs = model.eval()(**batch, output_hidden_states=True)
    name = "decoder_hidden_states" if model.config.is_encoder_decoder else "hidden_states"
    tensors = {name: value for name, value in outputs.items() if torch.is_tensor(value)}
    return tensors | {"hidden": outputs[name][-1]}


def assert_recorded_outputs(folder, model) -> None:
    """Compare with the outputs that an earlier version of the package recorded in its folder."""
    recorded = json.loads(Path(folder, "expected.json").read_text())
    outputs = outputs_of(model, {name: torch.tensor(value) for name, value in recorded["inputs"].items()})
    found = {
        "hidden_state": outputs["hidden"][:, 0],
        "prediction_logits": outputs["prediction_logits"][:, 1],
        "seq_relationship_logits": outputs["seq_relationship_logits"],
    }
    for name, value in recorded["outputs"].items():
        assert_close(found[name], torch.tensor(value), 5e-6)


def load(auto: str, folder: str, **options):
    """Return the model that an Auto class opens, and the loading info."""
    load_pretrained = getattr(transformers, auto).from_pretrained
    return load_pretrained(folder, output_loading_info=True, **{"trust_remote_code": True, **options})


def assert_complete(folder: str, head: str) -> None:
    """The folder has all code, and its configuration names it; the probe, if any, would be that of other weights."""
    config = json.loads(Path(folder, "config.json").read_text())
    assert config["auto_map"] == given["auto_map"]
    assert config["architectures"] == [f"ScratchBert{head}"]
    assert {path.name for path in Path(folder).glob("*.py")} == set(given["code"])
    assert not Path(folder, "probe.json").exists()


def own_openings() -> dict[str, str]:
    """Return an Auto class that opens a model of each class as that class, by head."""
    return {head: auto for head, auto, class_name in given["openings"] if class_name == f"ScratchBert{head}"}


def every_auto_class_opens_every_model() -> None:
    for head, auto, class_name in given["openings"]:
        model, info = load(auto, f"saved/{head}", ignore_mismatched_sizes=True)
        assert type(model).__name__ == class_name
        assert type(model).__module__.startswith("transformers_modules.")
        assert not model.training
        outputs, expected = outputs_of(model, given["batch"]), given["outputs"][head]
        assert_close(outputs["hidden"], expected["hidden"])
        if class_name == f"ScratchBert{head}":
            assert info == NOTHING
            assert_close(outputs, expected)


def models_are_saved_again() -> None:
    shutil.copytree("saved", "again")
    for head, auto in own_openings().items():
        model, _ = load(auto, "someone/scratch.bert-1" if head == "ForMaskedLM" else f"saved/{head}")
        for folder in (f"again/{head}", f"once more/{head}"):
            model.save_pretrained(folder)
            assert_complete(folder, head)
            model, info = load(auto, folder)
            assert info == NOTHING
            assert_close(outputs_of(model, given["batch"]), given["outputs"][head])


def models_are_made_from_a_configuration() -> None:
    config = transformers.AutoConfig.from_pretrained("configuration", num_labels=5, trust_remote_code=True)
    own_code = f"{type(config).__module__.rpartition('.')[0]}."
    files = {name.removeprefix(own_code) for name in sys.modules if name.startswith(own_code)}
    assert files == {"checkpoints", "configuration_scratchbert", "installed", "versions"}
    config.save_pretrained("configuration again")
    assert {path.name for path in Path("configuration again").glob("*.py")} == set(given["code"])
    config = transformers.AutoConfig.from_pretrained("configuration again", trust_remote_code=True)
    made = transformers.AutoModelForSequenceClassification.from_config(config, trust_remote_code=True)
    assert made.classifier.weight.shape == (5, config.hidden_size)
    made.save_pretrained("made")
    assert_complete("made", "ForSequenceClassification")
    model, info = load("AutoModelForTokenClassification", "saved/Model", config=config)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert_close(outputs_of(model, given["batch"])["hidden"], given["outputs"]["Model"]["hidden"])


def code_changed_in_a_folder_runs_and_is_saved() -> None:
    shutil.copytree("saved/Model", "changed")
    file = Path("changed", "feed_forward.py")
    file.write_text(file.read_text().replace("self.output(self.activation(", "2 * self.output(self.activation("))
    model, _ = load("AutoModel", "changed")
    changed = outputs_of(model, given["batch"])
    assert (changed["hidden"] - given["outputs"]["Model"]["hidden"]).abs().max() > 1e-2
    model.save_pretrained("changed again")
    assert Path("changed again", "feed_forward.py").read_text() == file.read_text()
    assert_close(outputs_of(load("AutoModel", "changed again")[0], given["batch"]), changed)


def earlier_versions_open_by_their_own_code() -> None:
    for folder in map(str, Path("earlier").iterdir()):
        model, info = load("AutoModelForPreTraining", folder)
        assert info == NOTHING
        assert_recorded_outputs(folder, model)
        model.save_pretrained(f"{folder} again")
        again, info = load("AutoModelForPreTraining", f"{folder} again")
        assert info == NOTHING
        assert_recorded_outputs(folder, again.optimize_for_inference())


def other_methods_require_the_package() -> None:
    model, _ = load("AutoModelForMaskedLM", "saved/ForMaskedLM")
    seq2seq, _ = load("AutoModelForSeq2SeqLM", "saved/ForConditionalGeneration")
    bert_config = transformers.BertConfig.from_pretrained("bert")
    calls = (
        model.optimize_for_inference,
        partial(model.save_calibration, "calibration"),
        partial(model.save_as_bert, "bert again"),
        partial(model.config_class.from_bert, bert_config),
        partial(model.config_class.from_pretrained, "bert"),
        partial(model.from_pretrained, "bert"),
        partial(model.from_pretrained, None, config=model.config, state_dict=model.state_dict()),
        partial(model.from_pretrained, "saved/ForMaskedLM", config=bert_config),
        partial(model.from_pretrained, "saved/ForMaskedLM", verify=True),
        partial(seq2seq.from_bert, "bert", decoder_start_token_id=2),
    )
    for call in calls:
        with pytest.raises(ImportError, match="-c constraints"):
            call()
    assert not Path("bert again").exists()
    assert_close(outputs_of(model, given["batch"]), given["outputs"]["ForMaskedLM"])


def registries() -> dict[str, list[str]]:
    """Return what is registered with torch and transformers."""
    return {
        "operators": sorted(torch._C._dispatch_get_all_op_names()),
        "names of weights": [str(get_checkpoint_conversion_mapping("scratchbert"))],
        "attention": sorted(ALL_ATTENTION_FUNCTIONS.keys()),
        "masks": sorted(ALL_MASK_ATTENTION_FUNCTIONS.keys()),
    }


def the_package_is_imported_later() -> None:
    """As in a notebook that has opened a model by its own code before. The import registers the Auto classes alone, and
    the first optimisation the operators."""
    copy, _ = load("AutoModelForMaskedLM", "saved/ForMaskedLM")
    del sys.modules["modeling_scratchbert"]
    before = registries()
    import modeling_scratchbert

    assert not any(name.startswith("modeling_scratchbert.cpu") for name in sys.modules)
    opened, info = load("AutoModelForMaskedLM", "saved/ForMaskedLM")
    assert type(opened) is modeling_scratchbert.ScratchBertForMaskedLM
    assert type(opened) is not type(copy)
    assert info == NOTHING
    outputs_of(opened, given["batch"])
    assert registries() == before
    opened.optimize_for_inference()
    operators = set(registries()["operators"]) - set(before["operators"])
    assert operators
    assert all(name.startswith("scratchbert_cpu::") for name in operators)
    copy.save_pretrained("saved by the copy")
    again = modeling_scratchbert.ScratchBertForMaskedLM.from_pretrained("saved by the copy", verify=True)
    assert_close(outputs_of(again, given["batch"]), given["outputs"]["ForMaskedLM"])


CHECKS = (
    every_auto_class_opens_every_model,
    models_are_saved_again,
    models_are_made_from_a_configuration,
    code_changed_in_a_folder_runs_and_is_saved,
    earlier_versions_open_by_their_own_code,
    other_methods_require_the_package,
    the_package_is_imported_later,
)


def main(folder: str) -> None:
    sys.modules["modeling_scratchbert"] = None  # an import raises ImportError
    torch.set_num_threads(1)
    os.chdir(folder)
    given.update(torch.load("given.pt"))
    results = {}
    for check in CHECKS:
        try:
            check()
            results[check.__name__] = None
        except Exception:
            results[check.__name__] = traceback.format_exc()
    Path("results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
