"""A saved folder opens by the Auto classes: without this package, with it, and with both copies of the code at once.

One process in which the package cannot be imported does all that needs one, and notes what became of each check; the
tests read the notes."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import modeling_scratchbert
from modeling_scratchbert import ScratchBertConfig, ScratchBertForMaskedLM, ScratchBertModel
from modeling_scratchbert.configuration_scratchbert import AUTO_MAP
from support.checkpoint_kinds import (
    assert_same_outputs,
    config_json,
    logged_warnings,
    outputs,
    write_bert,
    write_hub_cache,
)
from support.folders import DATA
from support.models import BERTS, NEEDS, SPECIAL, TINY, random_bert, random_encoder_decoder, random_scratchbert

NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
CODE = {path.name for path in Path(modeling_scratchbert.__file__).parent.glob("*.py")} - {"__init__.py"}
MODEL_CLASSES = {
    auto: path.split(".")[1]
    for auto, path in AUTO_MAP.items()
    if path.split(".")[1].removeprefix("ScratchBert") in BERTS
}
# Of which tests/data has a folder.
VERSIONS = ["0.1.0", "fa82c55"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "."]


def test_the_auto_map_is_complete():
    """Every public model class is opened by some Auto class, and by every one that opens its bert."""
    public = {name for name in modeling_scratchbert.__all__ if name.endswith("Model") or "BertFor" in name}
    public.remove("ScratchBertPreTrainedModel")
    public.remove("ScratchBertSeq2SeqModel")  # which AutoModel opens by way of ScratchBertModel
    assert {path.split(".")[1] for auto, path in AUTO_MAP.items() if auto != "AutoConfig"} == public
    bert = transformers.BertConfig
    for name in dir(transformers):
        mapping = getattr(getattr(transformers, name), "_model_mapping", None) if name.startswith("AutoModel") else None
        if mapping is not None and bert in mapping:
            ours = f"Scratch{mapping[bert].__name__}"
            assert ours not in public or AUTO_MAP[name] == f"modeling_scratchbert.{ours}"


# --- without the package

SCRIPT = '''
import copy, json, logging, math, os, pickle, shutil, sys, traceback, warnings
from collections import Counter

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "modeling_scratchbert":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
root, notes = sys.argv[1], {}
os.chdir(root)
import torch, transformers
torch.set_num_threads(1)
from pathlib import Path

AUTO_MAP, HEADS, CODE, VERSIONS = json.loads(Path("constants.json").read_text())
reference = torch.load("reference.pt")
without_a_probe = Counter()

class Listener(logging.Handler):
    """Counts, for each copy of the code, how often it says that a model is saved without a probe."""
    def emit(self, record):
        if "without a probe.json" in record.getMessage():
            assert "pip install -c constraints.txt" in record.getMessage(), record.getMessage()
            without_a_probe[record.name] += 1

logging.getLogger().addHandler(Listener(logging.WARNING))
batch = reference["batch"]
NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
TRUST = {"trust_remote_code": True}

def check(*parts):
    """Runs the function that it decorates, and notes under that name how it went."""
    def run(function):
        name = " ".join([function.__name__.replace("_", " "), *parts])
        try:
            function()
            notes[name] = "ok"
        except BaseException:
            notes[name] = traceback.format_exc()
    return run

def expect_advice_to_install(function, *arguments, **options):
    """The one error that names the package and how it is installed."""
    try:
        function(*arguments, **options)
    except ImportError as error:
        assert type(error) is ImportError and error.__cause__ is None and error.__context__ is None, repr(error)
        message = str(error)
        assert message.startswith("modeling_scratchbert.") and "pip install -c constraints.txt" in message, message
        return
    raise AssertionError("no error")

def compute(model):
    inputs = {k: v[None] if "MultipleChoice" in type(model).__name__ else v for k, v in batch.items()}
    with torch.no_grad():
        result = model.eval()(**inputs, output_hidden_states=True)
    return {"hidden": result.hidden_states[-1], **{k: v for k, v in result.items() if torch.is_tensor(v)}}

def same(ours, theirs, only=None):
    names = [only] if only else sorted(theirs)
    assert only or ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)

def open_as(auto, folder, **kwargs):
    kwargs = {**TRUST, **kwargs}
    return getattr(transformers, auto).from_pretrained(folder, output_loading_info=True, **kwargs)

def head_of(auto):
    return AUTO_MAP[auto].split(".")[1].removeprefix("ScratchBert")

AUTOS = [auto for auto in AUTO_MAP if head_of(auto) in HEADS]
AUTO_OF = {head_of(auto): auto for auto in reversed(AUTOS)}

def files(folder):
    return sorted(p.name for p in Path(folder).iterdir())

def complete(folder, head):
    config = json.loads(Path(folder, "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP, config["auto_map"]
    assert config["model_type"] == "scratchbert"
    assert config["architectures"] == ["ScratchBert" + head]
    assert {name for name in files(folder) if name.endswith(".py")} == set(CODE), files(folder)

@check()
def the_package_is_out_of_reach():
    try:
        import modeling_scratchbert
    except ImportError:
        return
    raise AssertionError(modeling_scratchbert.__file__)

for head in HEADS:
    for auto in AUTOS:
        @check(head, "by", auto)
        def opens():
            model, info = open_as(auto, f"saved/{head}", ignore_mismatched_sizes=True)
            assert type(model).__name__ == AUTO_MAP[auto].split(".")[1]
            assert type(model).__module__.startswith("transformers_modules")
            assert not model.training
            same(compute(model), reference[head], "hidden")
            if head_of(auto) == head:
                assert info == NOTHING, info
                same(compute(model), reference[head])

    @check(head)
    def configuration_and_tokenizer():
        config = transformers.AutoConfig.from_pretrained(f"saved/{head}", **TRUST)
        assert type(config).__name__ == "ScratchBertConfig" and config.hidden_size == 32
        for kwargs in (TRUST, {}):
            tokenizer = transformers.AutoTokenizer.from_pretrained(f"saved/{head}", **kwargs)
            assert tokenizer("The cat sat.")["input_ids"] == [2, 5, 6, 7, 10, 3]

    @check(head)
    def saved_again_and_opened_again():
        model = open_as(AUTO_OF[head], f"saved/{head}")[0]
        for generation in ("second", "third"):
            folder = f"{generation}/{head}"
            model.save_pretrained(folder)
            complete(folder, head)
            assert "probe.json" not in files(folder)
            for auto in (AUTO_OF[head], "AutoModelForMaskedLM", "AutoModel"):
                again, info = open_as(auto, folder)
                same(compute(again), reference[head], "hidden")
                if auto == AUTO_OF[head]:
                    model = again
                    assert info == NOTHING, info
                    same(compute(again), reference[head])

@check()
def it_asks_for_trust():
    try:
        transformers.AutoModel.from_pretrained("saved/Model", trust_remote_code=False)
    except ValueError as error:
        assert "trust_remote_code=True" in str(error), error
        return
    raise AssertionError("opened without trust")

@check()
def in_shards():
    model, info = open_as("AutoModelForPreTraining", "sharded")
    assert info == NOTHING
    same(compute(model), reference["ForPreTraining"])

@check()
def saved_over_a_folder_with_a_probe():
    shutil.copytree("saved/Model", "saved over")
    assert "probe.json" in files("saved over")
    open_as("AutoModel", "saved over")[0].save_pretrained("saved over")
    assert "probe.json" not in files("saved over")  # which was that of the former weights
    same(compute(open_as("AutoModel", "saved over")[0]), reference["Model"])

@check()
def what_needs_the_package():
    model = open_as("AutoModelForMaskedLM", "saved/ForMaskedLM")[0]
    seq2seq = type(open_as("AutoModelForSeq2SeqLM", "two halves")[0])
    bert_config = transformers.BertConfig.from_pretrained("bert")
    for dtype in (None, torch.float32, "int8"):
        expect_advice_to_install(model.optimize_for_inference, dtype)
    expect_advice_to_install(model.save_calibration, "calibration")
    expect_advice_to_install(model.save_as_bert, "bert out")
    assert not Path("bert out").exists() and not Path("calibration").exists()
    for folder in ("bert", "roberta"):
        expect_advice_to_install(type(model).from_pretrained, folder)
        expect_advice_to_install(type(model.config).from_pretrained, folder)
    expect_advice_to_install(seq2seq.from_pretrained, "two berts")
    expect_advice_to_install(seq2seq.from_bert, "bert", decoder_start_token_id=2, eos_token_id=3)
    expect_advice_to_install(type(model).from_pretrained, "saved/ForMaskedLM", config=bert_config)
    expect_advice_to_install(type(model.config).from_bert, bert_config)
    expect_advice_to_install(type(model).from_pretrained, None, config=model.config, state_dict=model.state_dict())
    for folder in ("saved/ForMaskedLM", "sharded", "two halves"):
        auto = "AutoModelForSeq2SeqLM" if folder == "two halves" else "AutoModelForMaskedLM"
        expect_advice_to_install(open_as, auto, folder, verify=True)
    same(compute(model), reference["ForMaskedLM"])  # no attempt changed it

def same_as_in(folder, model):
    expected = json.loads(Path(folder, "expected.json").read_text())
    with torch.no_grad():
        result = model(**{k: torch.tensor(v) for k, v in expected["inputs"].items()}, output_hidden_states=True)
    ours = {"hidden_state": result.hidden_states[-1][:, 0], "prediction_logits": result.prediction_logits[:, 1],
            "seq_relationship_logits": result.seq_relationship_logits}
    for name, value in expected["outputs"].items():
        torch.testing.assert_close(ours[name], torch.tensor(value), rtol=0, atol=5e-6)

for version in VERSIONS:
    @check(version)
    def a_folder_of_an_earlier_version_opens_by_its_own_code():
        for auto in AUTOS:
            model, info = open_as(auto, f"earlier/{version}")
            assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
            if head_of(auto) == "ForPreTraining":
                assert info == NOTHING, info
                same_as_in(f"earlier/{version}", model)
        assert not hasattr(sys.modules[type(model).__module__.rpartition(".")[0]], "installed")
        model, _ = open_as("AutoModelForPreTraining", f"earlier/{version}")
        model.save_pretrained(f"earlier/{version} by itself")
        again, info = open_as("AutoModelForPreTraining", f"earlier/{version} by itself")
        assert info == NOTHING, info
        same_as_in(f"earlier/{version}", again)
        same_as_in(f"earlier/{version}", again.optimize_for_inference())

@check()
def by_hub_id():
    model, info = open_as("AutoModelForMaskedLM", "someone/scratch.bert-1")
    assert info == NOTHING, info
    same(compute(model), reference["ForMaskedLM"])
    assert transformers.AutoTokenizer.from_pretrained("someone/scratch.bert-1").vocab_size == 11
    config = transformers.AutoConfig.from_pretrained("someone/scratch.bert-1", **TRUST)
    assert config.num_hidden_layers == 2
    model.save_pretrained("from hub")
    complete("from hub", "ForMaskedLM")
    again, info = open_as("AutoModelForMaskedLM", "from hub")
    assert info == NOTHING
    same(compute(again), reference["ForMaskedLM"])

@check()
def from_a_configuration():
    config = transformers.AutoConfig.from_pretrained("saved/Model", num_labels=5, **TRUST)
    model = transformers.AutoModelForSequenceClassification.from_config(config, **TRUST)
    assert model.classifier.weight.shape == (5, 32)
    model.save_pretrained("from config")
    complete("from config", "ForSequenceClassification")
    again, info = open_as("AutoModelForSequenceClassification", "from config")
    assert info == NOTHING
    same(compute(again), compute(model))

@check()
def with_its_own_configuration():
    config = transformers.AutoConfig.from_pretrained("saved/Model", num_labels=5, **TRUST)
    model, info = open_as("AutoModelForTokenClassification", "saved/Model", config=config)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    same(compute(model), reference["Model"], "hidden")
    assert model.config.num_labels == 5

@check()
def in_a_pipeline():
    fill = transformers.pipeline("fill-mask", model="saved/ForMaskedLM", **TRUST)
    assert len(fill("The cat [MASK] on the mat.", top_k=3)) == 3
    classify = transformers.pipeline("text-classification", model="saved/ForSequenceClassification", **TRUST)
    assert classify("The cat sat.")[0]["label"] in ("LABEL_0", "LABEL_1")

@check()
def trained_by_trainer():
    def train(model):
        torch.manual_seed(0)
        data = [{"input_ids": ids, "labels": ids[0] % 2} for ids in batch["input_ids"].repeat(4, 1)]
        arguments = transformers.TrainingArguments(
            "trained", max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_steps=2,
            disable_tqdm=True, dataloader_num_workers=2, learning_rate=1e-2)
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train()
        return trainer
    before = open_as("AutoModelForSequenceClassification", "saved/ForSequenceClassification")[0]
    model = copy.deepcopy(before)
    trainer = train(model)
    assert all(math.isfinite(entry["train_loss"]) for entry in trainer.state.log_history if "train_loss" in entry)
    state = model.state_dict()
    changed = {name for name, tensor in before.state_dict().items() if not torch.equal(tensor, state[name])}
    assert {"classifier.weight", "model.encoder.blocks.0.attention.query.weight"} <= changed
    complete("trained/checkpoint-2", "ForSequenceClassification")
    trainer.save_model("trained/last")
    again, info = open_as("AutoModelForSequenceClassification", "trained/last")
    assert info == NOTHING
    same(compute(again), compute(model))

@check()
def in_workers_of_a_data_loader():
    model = open_as("AutoModel", "saved/Model")[0].eval()
    class Embedded(torch.utils.data.Dataset):
        def __len__(self):
            return len(batch["input_ids"])
        def __getitem__(self, i):
            with torch.no_grad():
                return model(batch["input_ids"][i : i + 1]).pooler_output[0]
    dataset = Embedded()
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=2)
    torch.testing.assert_close(next(iter(loader)), torch.stack([dataset[0], dataset[1]]), rtol=0, atol=1e-6)

@check()
def through_pickle_and_deepcopy():
    model = open_as("AutoModelForMaskedLM", "saved/ForMaskedLM")[0]
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again) is type(model)
        same(compute(again), reference["ForMaskedLM"])

@check()
def compiled():
    model = open_as("AutoModelForMaskedLM", "saved/ForMaskedLM")[0]
    whole = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(whole(**batch).logits, reference["ForMaskedLM"]["logits"], rtol=0, atol=1e-5)
    model.train()
    torch.compile(model, backend="aot_eager")(**batch, labels=batch["input_ids"]).loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().max() > 0

@check()
def gradients():
    model = open_as("AutoModelForMaskedLM", "saved/ForMaskedLM")[0].train()
    model(**batch, labels=batch["input_ids"]).loss.backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, missing

@check()
def through_dill():
    import dill
    model = open_as("AutoModelForMaskedLM", "saved/ForMaskedLM")[0]
    again = dill.loads(dill.dumps(model))
    assert type(again) is type(model)
    same(compute(again), reference["ForMaskedLM"])

@check()
def in_a_function_for_datasets_map():
    import datasets
    from datasets.fingerprint import Hasher
    model = open_as("AutoModel", "saved/Model")[0].eval()
    def embed(row):
        with torch.no_grad():
            return {"first": model(torch.tensor([row["ids"]])).pooler_output[0].tolist()}
    Hasher.hash(embed)  # `map` warns where this raises
    rows = datasets.Dataset.from_dict({"ids": batch["input_ids"].tolist()})
    here = [embed(row)["first"] for row in rows]
    torch.testing.assert_close(torch.tensor(rows.map(embed)["first"][:]), torch.tensor(here))
    torch.testing.assert_close(torch.tensor(rows.map(embed, num_proc=2)["first"][:]), torch.tensor(here))

def generated(model):
    return model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=5, do_sample=False)

@check()
def a_causal_model_generates():
    for folder in ("saved/ForCausalLM", "second/ForCausalLM"):
        model = open_as("AutoModelForCausalLM", folder)[0]
        assert torch.equal(generated(model), reference["generated"]["ForCausalLM"])

def compute_halves(model):
    with torch.no_grad():
        result = model(**batch, decoder_input_ids=batch["input_ids"].flip(1), output_hidden_states=True)
    hidden = {"decoder": result.decoder_hidden_states[-1], "encoder": result.encoder_hidden_states[-1]}
    return {**hidden, **{k: v for k, v in result.items() if torch.is_tensor(v)}}

@check()
def two_halves():
    model, info = open_as("AutoModelForSeq2SeqLM", "two halves")
    for generation in ("second", "third"):
        assert type(model).__name__ == "ScratchBertForConditionalGeneration"
        assert type(model).__module__.startswith("transformers_modules")
        assert info == NOTHING, info
        assert not model.training
        same(compute_halves(model), reference["two halves"])
        assert torch.equal(generated(model), reference["generated"]["two halves"])
        model.save_pretrained(f"{generation}/two halves")
        complete(f"{generation}/two halves", "ForConditionalGeneration")
        base, info = open_as("AutoModel", f"{generation}/two halves")
        assert type(base).__name__ == "ScratchBertSeq2SeqModel", type(base).__name__
        assert not info["missing_keys"], info
        same(compute_halves(base), compute_halves(model.model))
        model, info = open_as("AutoModelForSeq2SeqLM", f"{generation}/two halves")
    base.save_pretrained("base/two halves")
    complete("base/two halves", "Seq2SeqModel")
    again, info = open_as("AutoModel", "base/two halves")
    assert info == NOTHING, info
    same(compute_halves(again), compute_halves(base))

@check()
def two_halves_are_not_opened_as_one():
    for auto in ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        try:
            open_as(auto, "two halves")
        except ValueError as error:
            assert "ScratchBertForConditionalGeneration" in str(error), error
        else:
            raise AssertionError(auto)

@check()
def two_halves_from_a_configuration():
    config = transformers.AutoConfig.from_pretrained("two halves", **TRUST)
    made = transformers.AutoModel.from_config(config, **TRUST)
    assert type(made).__name__ == "ScratchBertSeq2SeqModel"
    made = transformers.AutoModelForSeq2SeqLM.from_config(config, **TRUST)
    assert made.lm_head.decoder.weight is made.get_decoder().get_input_embeddings().weight

@check()
def code_changed_in_the_folder_is_the_code_that_runs_and_is_saved():
    shutil.copytree("saved/Model", "changed")
    file = Path("changed/feed_forward.py")
    code = file.read_text().replace("self.output(self.activation(", "2 * self.output(self.activation(")
    assert code != file.read_text()
    file.write_text(code)
    model = open_as("AutoModel", "changed")[0]
    changed = compute(model)
    assert (changed["hidden"] - reference["Model"]["hidden"]).abs().max() > 1e-2
    model.save_pretrained("changed again")
    complete("changed again", "Model")
    assert Path("changed again/feed_forward.py").read_text() == code
    same(compute(open_as("AutoModel", "changed again")[0]), changed)
    same(compute(open_as("AutoModel", "saved/Model")[0]), reference["Model"])

@check()
def a_configuration_saved_alone():
    config = transformers.AutoConfig.from_pretrained("config", **TRUST)
    assert type(config).__name__ == "ScratchBertConfig" and config.vocab_size == 99

@check()
def a_configuration_saved_alone_from_here():
    config = transformers.AutoConfig.from_pretrained("saved/Model", **TRUST)
    config.save_pretrained("config again")
    assert transformers.AutoConfig.from_pretrained("config again", **TRUST).vocab_size == 99

@check()
def saved_without_a_probe_which_is_said_once():
    assert without_a_probe and set(without_a_probe.values()) == {1}, without_a_probe

# PEFT changes how transformers loads models, and comes last.
import peft

@check()
def peft_asks_for_target_modules():
    model = open_as("AutoModel", "saved/Model")[0]
    try:
        peft.get_peft_model(model, peft.LoraConfig())
    except ValueError as error:
        assert "target_modules" in str(error), error
    else:
        raise AssertionError("no error")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"]))
    same(compute(adapted.base_model.model), reference["Model"])
    adapted.save_pretrained("adapter")
    again = peft.PeftModel.from_pretrained(open_as("AutoModel", "saved/Model")[0], "adapter")
    same(compute(again.base_model.model), reference["Model"])

# From here on the package can be imported, as in a notebook that has opened a model from the Hub before.
copies = {head: open_as(AUTO_OF[head], f"saved/{head}")[0] for head in ("Model", "ForMaskedLM", "ForPreTraining")}
copies["ForConditionalGeneration"] = open_as("AutoModelForSeq2SeqLM", "two halves")[0]
copied_config = transformers.AutoConfig.from_pretrained("saved/Model", **TRUST)
sys.meta_path.pop(0)
import modeling_scratchbert

for version in VERSIONS:
    @check(version)
    def a_folder_of_an_earlier_version_opens_by_the_package():
        folder, again = f"earlier/{version}", f"earlier/{version} again"
        model, info = open_as("AutoModelForPreTraining", folder, trust_remote_code=False)
        assert type(model) is modeling_scratchbert.ScratchBertForPreTraining and info == NOTHING
        same_as_in(folder, model)
        model.save_pretrained(again)
        complete(again, "ForPreTraining")
        model, _ = open_as("AutoModelForPreTraining", again, trust_remote_code=False, verify=True)
        same_as_in(folder, model)
        same_as_in(folder, model.optimize_for_inference())
        verify = {"trust_remote_code": False, "verify": True}
        if Path(folder, "probe.json").exists():
            same_as_in(folder, open_as("AutoModelForPreTraining", folder, **verify)[0])
            return
        try:
            open_as("AutoModelForPreTraining", folder, **verify)
        except OSError as error:
            assert "has no probe.json" in str(error), error
            return
        raise AssertionError("verified without a probe")

@check()
def a_bert_loads_into_the_copy_and_goes_out_again():
    ours = type(copies["ForPreTraining"])
    model, info = ours.from_pretrained("bert", output_loading_info=True)
    assert info == NOTHING, info
    bert = transformers.BertForPreTraining.from_pretrained("bert")
    same(compute(model), compute(bert))
    model.save_pretrained("bert as ours")
    complete("bert as ours", "ForPreTraining")
    model.save_as_bert("bert out")
    again, info = transformers.AutoModelForPreTraining.from_pretrained("bert out", output_loading_info=True)
    assert type(again) is transformers.BertForPreTraining and info == NOTHING
    same(compute(again), compute(bert))
    try:
        ours.from_pretrained("roberta")
    except ValueError as error:
        assert "'roberta'" in str(error)
        return
    raise AssertionError("a RoBERTa was loaded")

@check()
def a_copy_verifies_with_the_package():
    def opened(head, folder, **options):
        model = type(copies[head]).from_pretrained(folder, verify=True, **options)
        assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
        return model
    opened("ForConditionalGeneration", "two halves")
    opened("Model", "sharded")
    opened("ForPreTraining", "sharded")
    same(compute(opened("ForMaskedLM", "someone/scratch.bert-1")), reference["ForMaskedLM"])
    shutil.copytree("saved/ForMaskedLM", "damaged")
    weights = bytearray(Path("damaged/model.safetensors").read_bytes())
    weights[-4] ^= 1
    Path("damaged/model.safetensors").write_bytes(weights)
    type(copies["ForMaskedLM"]).from_pretrained("damaged")
    try:
        opened("ForMaskedLM", "damaged")
    except ValueError as error:
        assert "differs from probe.json" in str(error), error
        return
    raise AssertionError("opened")

@check()
def two_halves_from_a_bert_and_from_two():
    ours = type(copies["ForConditionalGeneration"])
    model = ours.from_bert("bert", decoder_start_token_id=2, eos_token_id=3)
    bert = transformers.BertModel.from_pretrained("bert")
    with torch.no_grad():
        same(model.get_encoder()(**batch, padding_free=False), bert(**batch), "last_hidden_state")
    assert generated(model).shape[0] == 2
    model, info = ours.from_pretrained("two berts", output_loading_info=True)
    assert info == NOTHING, info
    assert torch.equal(generated(model), generated(transformers.EncoderDecoderModel.from_pretrained("two berts")))
    model.save_pretrained("two berts as ours")
    complete("two berts as ours", "ForConditionalGeneration")

@check()
def a_copy_is_optimised_with_the_package():
    for dtype, tolerance in ((None, 1e-5), ("int8", 1.0)):
        model = copy.deepcopy(copies["ForMaskedLM"])
        assert model.optimize_for_inference(dtype) is model
        layers = [type(layer).__module__ for layer in model.modules()]
        assert any(name.startswith("modeling_scratchbert.cpu") for name in layers), sorted(set(layers))
        again = pickle.loads(pickle.dumps(model))
        computed = compute(model)["logits"]
        torch.testing.assert_close(computed, reference["ForMaskedLM"]["logits"], rtol=0, atol=tolerance)
        assert torch.equal(compute(again)["logits"], computed)
        for attempt in (lambda: model.save_pretrained("optimised"), model.state_dict, model.train):
            try:
                attempt()
            except RuntimeError as error:
                assert "optimised for inference" in str(error), error
            else:
                raise AssertionError(f"no error from {attempt}")
        assert not Path("optimised").exists()

@check()
def peft_finds_the_layers_of_a_copy_with_the_package():
    adapted = peft.get_peft_model(copy.deepcopy(copies["Model"]), peft.LoraConfig())
    names = {name.rpartition(".")[0] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert {name.split(".lora_A")[0].rpartition(".")[2] for name in names} == {"query", "value"}, names

@check("ForMaskedLM")
def both_copies_are_there():
    assert type(copies["ForMaskedLM"]) is not modeling_scratchbert.ScratchBertForMaskedLM
    assert type(copied_config) is not modeling_scratchbert.ScratchBertConfig

for trust in (True, False, None):
    @check(str(trust))
    def with_the_package_it_is_the_package_that_opens_trust_or_not():
        model, info = open_as("AutoModelForMaskedLM", "saved/ForMaskedLM", trust_remote_code=trust)
        assert type(model) is modeling_scratchbert.ScratchBertForMaskedLM, type(model).__module__
        assert info == NOTHING
        same(compute(model), reference["ForMaskedLM"])

@check()
def the_copy_s_configuration_in_the_package_s_model():
    ours = modeling_scratchbert.ScratchBertForMaskedLM
    ours(copied_config)
    model, info = ours.from_pretrained("saved/ForMaskedLM", config=copied_config, output_loading_info=True)
    assert info == NOTHING
    same(compute(model), reference["ForMaskedLM"])
    model.save_pretrained("crossed")
    complete("crossed", "ForMaskedLM")
    same(compute(open_as("AutoModelForMaskedLM", "crossed")[0]), reference["ForMaskedLM"])
    from_bert = ours.from_pretrained("bert", config=copied_config)
    same(compute(from_bert), compute(transformers.BertForMaskedLM.from_pretrained("bert")))

@check()
def the_package_s_configuration_in_the_copy_s_model():
    copy = type(copies["ForMaskedLM"])
    config = modeling_scratchbert.ScratchBertConfig.from_pretrained("saved/ForMaskedLM")
    copy(config)
    model, info = copy.from_pretrained("saved/ForMaskedLM", config=config, output_loading_info=True)
    assert info == NOTHING
    same(compute(model), reference["ForMaskedLM"])
    model.save_pretrained("crossed back")
    complete("crossed back", "ForMaskedLM")
    again = modeling_scratchbert.ScratchBertForMaskedLM.from_pretrained("crossed back")
    same(compute(again), reference["ForMaskedLM"])

@check()
def weights_go_from_one_copy_to_the_other():
    model = modeling_scratchbert.ScratchBertForMaskedLM(copied_config)
    model.load_state_dict(copies["ForMaskedLM"].state_dict())
    same(compute(model), reference["ForMaskedLM"])

@check()
def two_halves_of_one_copy_in_the_other():
    ours = modeling_scratchbert.ScratchBertForConditionalGeneration
    config = transformers.AutoConfig.from_pretrained("two halves", **TRUST)
    assert type(config) is modeling_scratchbert.ScratchBertConfig
    copied = copies["ForConditionalGeneration"]
    assert type(copied) is not ours and type(copied.config) is not type(config)
    model = ours(copied.config)
    model.load_state_dict(copied.state_dict())
    assert torch.equal(generated(model.eval()), reference["generated"]["two halves"])
    model.save_pretrained("crossed two halves")
    complete("crossed two halves", "ForConditionalGeneration")
    copied.save_pretrained("after two halves")
    complete("after two halves", "ForConditionalGeneration")
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained("after two halves")
    assert type(again) is ours
    assert torch.equal(generated(again), reference["generated"]["two halves"])

@check()
def the_copy_still_saves():
    copies["ForMaskedLM"].save_pretrained("after")
    complete("after", "ForMaskedLM")
    again = modeling_scratchbert.ScratchBertForMaskedLM.from_pretrained("after")
    same(compute(again), reference["ForMaskedLM"])

Path("notes.json").write_text(json.dumps(notes))
'''

CHECKS = [
    "the package is out of reach",
    *(f"opens {head} by {auto}" for head in BERTS for auto in MODEL_CLASSES),
    *(f"configuration and tokenizer {head}" for head in BERTS),
    *(f"saved again and opened again {head}" for head in BERTS),
    "it asks for trust",
    "in shards",
    "saved over a folder with a probe",
    "saved without a probe which is said once",
    "what needs the package",
    *(
        f"a folder of an earlier version opens by {what} {version}"
        for what in ("its own code", "the package")
        for version in VERSIONS
    ),
    "by hub id",
    "from a configuration",
    "with its own configuration",
    "in a pipeline",
    "trained by trainer",
    "in workers of a data loader",
    "through pickle and deepcopy",
    "compiled",
    "gradients",
    "through dill",
    "in a function for datasets map",
    "peft asks for target modules",
    "peft finds the layers of a copy with the package",
    "a bert loads into the copy and goes out again",
    "a copy verifies with the package",
    "a copy is optimised with the package",
    "a causal model generates",
    "two halves",
    "two halves are not opened as one",
    "two halves from a bert and from two",
    "two halves from a configuration",
    "code changed in the folder is the code that runs and is saved",
    "a configuration saved alone",
    "a configuration saved alone from here",
    "both copies are there ForMaskedLM",
    *(f"with the package it is the package that opens trust or not {trust}" for trust in (True, False, None)),
    "the copy s configuration in the package s model",
    "the package s configuration in the copy s model",
    "weights go from one copy to the other",
    "two halves of one copy in the other",
    "the copy still saves",
]


def add_tokenizer(folder):
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)


def references_of_generators(root, batch):
    """What a model of two halves, saved in `root`, and the causal one compute and generate."""
    fields = {**SPECIAL, "num_decoder_layers": 1, "hidden_dropout_prob": 0.0}
    two_halves = random_scratchbert("ForConditionalGeneration", **fields)
    two_halves.save_pretrained(root / "two halves")
    random_encoder_decoder().save_pretrained(root / "two berts")
    causal = random_scratchbert("ForCausalLM")
    generated = {
        name: model.generate(**batch, max_new_tokens=5, do_sample=False)
        for name, model in (("ForCausalLM", causal), ("two halves", two_halves))
    }
    with torch.no_grad():
        result = two_halves(**batch, decoder_input_ids=batch["input_ids"].flip(1), output_hidden_states=True)
    tensors = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    tensors |= {"decoder": result.decoder_hidden_states[-1], "encoder": result.encoder_hidden_states[-1]}
    return {"generated": generated, "two halves": tensors}


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub_form")
    generator = torch.Generator().manual_seed(2)
    batch = {
        "input_ids": torch.randint(5, 90, (2, 6), generator=generator),
        "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]),
    }
    reference = {"batch": batch}
    for head in BERTS:
        model = random_scratchbert(head)
        model.save_pretrained(root / "saved" / head)
        add_tokenizer(root / "saved" / head)
        inputs = {name: tensor[None] if head == "ForMultipleChoice" else tensor for name, tensor in batch.items()}
        with torch.no_grad():
            result = model(**inputs, output_hidden_states=True)
        reference[head] = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
        reference[head]["hidden"] = result.hidden_states[-1]
    reference |= references_of_generators(root, batch)
    torch.save(reference, root / "reference.pt")
    random_scratchbert("ForPreTraining").save_pretrained(root / "sharded", max_shard_size="10KB")
    write_bert(root / "bert", random_bert(seed=5), "sharded bin", layer_norm="gamma")
    write_bert(root / "roberta", fields={"model_type": "roberta"})
    ScratchBertConfig(**TINY).save_pretrained(root / "config")
    for version in VERSIONS:
        shutil.unpack_archive(DATA / f"scratchbert-{version}.zip", root / "earlier" / version)
    write_hub_cache(root / "home" / "hub", "someone/scratch.bert-1", root / "saved" / "ForMaskedLM")
    (root / "constants.json").write_text(json.dumps([AUTO_MAP, BERTS, sorted(CODE), VERSIONS]))
    (root / "check.py").write_text(SCRIPT)

    environment = {
        **os.environ,
        "HF_HOME": str(root / "home"),
        "HF_MODULES_CACHE": str(root / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, str(root / "check.py"), str(root)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((root / "notes.json").read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_without_the_package(notes, check):
    assert notes[check] == "ok", notes[check]


def test_every_check_is_a_test(notes):
    assert sorted(notes) == sorted(CHECKS)


# --- with the package


@pytest.mark.parametrize("auto", MODEL_CLASSES)
@pytest.mark.parametrize("saved", ["Model", "ForPreTraining", "ForQuestionAnswering"])
def test_with_the_package_no_trust_is_needed(tmp_path, saved, auto):
    model = random_scratchbert(saved)
    model.save_pretrained(tmp_path)
    with logged_warnings() as warnings:
        again, info = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is getattr(modeling_scratchbert, MODEL_CLASSES[auto])
    assert_same_outputs(again, model, only="hidden_states")
    if type(again) is type(model):
        assert info == NOTHING
        assert not warnings


def test_with_the_package_the_configuration_and_the_tokenizer_open_too(tmp_path):
    random_scratchbert().save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    with logged_warnings() as warnings:
        assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is ScratchBertConfig
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("The cat sat.")["input_ids"] == [2, 5, 6, 7, 10, 3]
    assert not warnings
    for auto, name in MODEL_CLASSES.items():
        head = name.removeprefix("ScratchBert")
        model = getattr(transformers, auto).from_config(ScratchBertConfig(**TINY, **NEEDS.get(head, {})))
        assert type(model).__name__ == name


def test_importing_the_package_twice_does_no_harm():
    importlib.reload(modeling_scratchbert)
    assert transformers.AutoConfig.for_model("scratchbert").model_type == "scratchbert"


# --- a class of the user's own

USERS_MODULE = '''
"""As a user would write it."""

import torch
from torch import nn

from modeling_scratchbert import ScratchBertConfig, ScratchBertForSequenceClassification, ScratchBertModel
from modeling_scratchbert.transformer import TransformerBlock


class MyClassifier(ScratchBertForSequenceClassification):
    """Another head."""

    def __init__(self, config):
        super().__init__(config)
        self.classifier = nn.Sequential(nn.Linear(config.hidden_size, 8), nn.Tanh(), nn.Linear(8, config.num_labels))
        self.post_init()


class ParallelBlock(TransformerBlock):
    """Another block: attention and feed-forward side by side."""

    def forward(self, hidden_states, attention_mask=None, *args, past_key_values=None, **kwargs):
        attended = self.attention(hidden_states, attention_mask, **kwargs)[0]
        return self.feed_forward_norm(hidden_states + attended + self.feed_forward(hidden_states))


class ParallelModel(ScratchBertModel):
    def __init__(self, config):
        super().__init__(config)
        blocks = (ParallelBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.encoder.blocks = nn.ModuleList(blocks)
        self.post_init()


class ScaledConfig(ScratchBertConfig):
    """A field more."""

    model_type = "scaledscratchbert"
    scale: float = 1.0


class ScaledModel(ScratchBertModel):
    config: ScaledConfig

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        result["last_hidden_state"] = result["last_hidden_state"] * self.config.scale
        return result


class WithMoreConfig(ScratchBertConfig):
    """A field more, and still a ScratchBert."""

    more: int = 1


class WithMoreModel(ScratchBertModel):
    config: WithMoreConfig
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The user's module, imported from a file."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "my_models.py").write_text(USERS_MODULE)
    monkeypatch.syspath_prepend(tmp_path / "src")
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    yield importlib.import_module("my_models")
    sys.modules.pop("my_models", None)


# The Auto classes that open the class that it derives from, and now would drop what was changed.
DERIVED = {
    "MyClassifier": "AutoModelForSequenceClassification",
    "ParallelModel": "AutoModel",
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_class_of_one_s_own_saves_and_loads(tmp_path, mine, name):
    model = getattr(mine, name)(ScratchBertConfig(**TINY)).eval()
    with logged_warnings() as warnings:
        model.save_pretrained(tmp_path / "saved")
    again, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert info == NOTHING
    assert_same_outputs(again, model)
    config = config_json(tmp_path / "saved")
    assert config["architectures"] == [name]
    assert set(config["auto_map"]) == {"AutoConfig"}  # any of our classes would compute something else
    assert name in "\n".join(warnings)
    assert "register_for_auto_class" in "\n".join(warnings)
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == CODE
    again.save_pretrained(tmp_path / "again")
    assert config_json(tmp_path / "again")["auto_map"] == config["auto_map"]


@pytest.mark.parametrize("name", DERIVED)
def test_a_registered_class_of_one_s_own_is_the_one_that_opens(tmp_path, mine, name):
    cls, auto = getattr(mine, name), DERIVED[name]
    cls.register_for_auto_class(auto)
    model = cls(ScratchBertConfig(**TINY)).eval()
    with logged_warnings() as warnings:
        model.save_pretrained(tmp_path / "saved")
    assert not warnings
    auto_map = config_json(tmp_path / "saved")["auto_map"]
    assert auto_map == {"AutoConfig": AUTO_MAP["AutoConfig"], auto: f"my_models.{name}"}
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == CODE | {"my_models.py"}
    assert_same_outputs(cls.from_pretrained(tmp_path / "saved"), model)
    # Its parent, saved afterwards, is none the wiser.
    parent = next(base for base in cls.__mro__ if base.__module__.startswith("modeling_scratchbert"))
    parent(ScratchBertConfig(**TINY)).save_pretrained(tmp_path / "parent")
    assert config_json(tmp_path / "parent")["auto_map"] == AUTO_MAP


def test_a_changed_block_computes_something_else(tmp_path, mine):
    """That the tests above do not compare a model with itself."""
    bert = random_bert("Model")
    write_bert(tmp_path, bert)
    changed = outputs(mine.ParallelModel.from_pretrained(tmp_path))
    plain = outputs(ScratchBertModel.from_pretrained(tmp_path))
    assert (changed["last_hidden_state"] - plain["last_hidden_state"]).abs().max() > 0.1


def test_a_class_of_one_s_own_loads_a_scratchbert_and_the_reverse(tmp_path, mine):
    plain = random_scratchbert("ForSequenceClassification")
    plain.save_pretrained(tmp_path / "plain")
    own, info = mine.MyClassifier.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert info["missing_keys"] == {f"classifier.{i}.{leaf}" for i in (0, 2) for leaf in ("weight", "bias")}
    assert_same_outputs(own, plain, only="hidden_states")
    own.save_pretrained(tmp_path / "own")
    back = ScratchBertForMaskedLM.from_pretrained(tmp_path / "own")
    assert_same_outputs(back, plain, only="hidden_states")
    back.save_pretrained(tmp_path / "back")
    assert config_json(tmp_path / "back")["auto_map"] == AUTO_MAP


@pytest.mark.parametrize(("name", "field", "value"), [("Scaled", "scale", 3.5), ("WithMore", "more", 7)])
def test_a_configuration_of_one_s_own(tmp_path, mine, name, field, value):
    config_class, model_class = getattr(mine, f"{name}Config"), getattr(mine, f"{name}Model")
    config = config_class(**TINY, **{field: value})
    model = model_class(config).eval()
    model.save_pretrained(tmp_path / "saved")
    assert config_json(tmp_path / "saved")["model_type"] == config_class.model_type
    for kwargs in ({}, {"config": config}):
        again, info = model_class.from_pretrained(tmp_path / "saved", output_loading_info=True, **kwargs)
        assert info == NOTHING
        assert type(again.config) is config_class
        assert getattr(again.config, field) == value
        assert_same_outputs(again, model)
    assert getattr(config_class.from_pretrained(tmp_path / "saved"), field) == value
    # A BERT still loads, with the field's default, and another model still does not.
    write_bert(tmp_path / "bert", random_bert("Model"))
    from_bert = model_class.from_pretrained(tmp_path / "bert")
    assert type(from_bert.config) is config_class
    assert_same_outputs(from_bert, random_bert("Model"))
    write_bert(tmp_path / "roberta", random_bert("Model"), fields={"model_type": "roberta"})
    with pytest.raises(ValueError, match="'roberta'"):
        model_class.from_pretrained(tmp_path / "roberta")


def test_a_registered_configuration_of_one_s_own(tmp_path, mine):
    mine.ScaledConfig.register_for_auto_class()
    mine.ScaledModel.register_for_auto_class("AutoModel")
    model = mine.ScaledModel(mine.ScaledConfig(**TINY, scale=2.0))
    model.save_pretrained(tmp_path / "saved")
    auto_map = config_json(tmp_path / "saved")["auto_map"]
    assert auto_map["AutoConfig"] == "my_models.ScaledConfig"
    assert auto_map["AutoModel"] == "my_models.ScaledModel"
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == CODE | {"my_models.py"}
    again = mine.ScaledModel.from_pretrained(tmp_path / "saved")
    assert again.config.scale == 2.0


def test_a_class_from_a_notebook(tmp_path, mine, monkeypatch):
    """Its code is in no file that could be saved; the weights and the rest are."""
    monkeypatch.setattr(mine.MyClassifier, "__module__", "__main__")
    mine.MyClassifier.register_for_auto_class("AutoModelForSequenceClassification")
    model = mine.MyClassifier(ScratchBertConfig(**TINY)).eval()
    model.save_pretrained(tmp_path / "saved")
    assert "AutoModelForSequenceClassification" not in config_json(tmp_path / "saved")["auto_map"]
    assert_same_outputs(mine.MyClassifier.from_pretrained(tmp_path / "saved"), model)
