"""What is written: our own names on every way out, BERT's on one, nothing half, and the tied matrix once."""

import copy
import json
import pickle
import re
import shutil
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import modeling_scratchbert.bert.export
from modeling_scratchbert import (
    ScratchBertConfig,
    ScratchBertForMaskedLM,
    ScratchBertForPreTraining,
    ScratchBertModel,
    ScratchBertPreTrainedModel,
)
from modeling_scratchbert.configuration_scratchbert import AUTO_MAP
from support.checkpoint_kinds import (
    NOTHING,
    assert_same_outputs,
    change_config,
    config_json,
    logged_warnings,
    write_bert,
    write_weights,
)
from support.folders import ROOT
from support.models import BERTS, NEEDS, OURS, REFERENCES, TINY, random_bert, random_scratchbert, tiny_config
from support.versions import since

CODE = {path.name for path in Path(modeling_scratchbert.__file__).parent.glob("*.py")} - {"__init__.py"}

# What a checkpoint of one block holds. People's files have these names: whoever changes one owes them a way to load.
NAMES = {
    "model.embeddings.word_embeddings.weight",
    "model.embeddings.position_embeddings.weight",
    "model.embeddings.token_type_embeddings.weight",
    *(
        f"model.{module}.{leaf}"
        for leaf in ("weight", "bias")
        for module in (
            "embeddings.norm",
            "encoder.blocks.0.attention.query",
            "encoder.blocks.0.attention.key",
            "encoder.blocks.0.attention.value",
            "encoder.blocks.0.attention.output",
            "encoder.blocks.0.attention_norm",
            "encoder.blocks.0.feed_forward.intermediate",
            "encoder.blocks.0.feed_forward.output",
            "encoder.blocks.0.feed_forward_norm",
            "pooler.dense",
        )
    ),
    "lm_head.dense.weight",
    "lm_head.dense.bias",
    "lm_head.norm.weight",
    "lm_head.norm.bias",
    "lm_head.decoder.bias",
    "next_sentence_head.weight",
    "next_sentence_head.bias",
}


def stored(folder, variant=None) -> dict:
    """All tensors of the checkpoint in `folder`, from one file or from shards."""
    pattern = f"model.{variant}*.safetensors" if variant else "model*.safetensors"
    tensors = {}
    for file in folder.glob(pattern):
        tensors |= load_file(file)
    return tensors


def assert_ours(folder, model, variant=None):
    """`folder` holds `model` as a ScratchBert checkpoint, whole: names, weights, code, and the way to it."""
    wanted = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.decoder.weight", None)
    tensors = stored(folder, variant)
    assert set(tensors) == set(wanted)
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    config = config_json(folder)
    assert config["model_type"] == "scratchbert"
    assert config["architectures"] == [type(model).__name__]
    assert config["auto_map"] == AUTO_MAP
    assert {path.name for path in folder.glob("*.py")} == CODE
    again, info = type(model).from_pretrained(folder, variant=variant, output_loading_info=True)
    assert info == NOTHING
    assert again.dtype == model.dtype
    assert_same_outputs(again, model)
    return again


# --- our own names, however the model came about and whichever way it is saved


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub, as a folder: what is uploaded lies in it, by repository."""

    def create_commit(self, repo_id, operations, **kwargs):
        uploads.append(repo_id)
        for operation in operations:
            target = tmp_path / "hub" / repo_id / operation.path_in_repo
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(operation.path_or_fileobj, target)

    def create_repo(self, repo_id, **kwargs):
        return huggingface_hub.RepoUrl(f"{huggingface_hub.constants.ENDPOINT}/someone/{repo_id.split('/')[-1]}")

    def no_card(repo_id, **kwargs):
        card = huggingface_hub.ModelCard("---\n---\nA card.")
        card.data.tags = []
        return card

    uploads = []
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", create_commit)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    # Before 5.15, transformers imports functions instead of the client's methods.
    for module in (transformers.utils.hub, transformers.modeling_utils):
        monkeypatch.setattr(module, "create_repo", partial(create_repo, None), raising=False)
        monkeypatch.setattr(module, "create_commit", partial(create_commit, None), raising=False)
    monkeypatch.setattr(huggingface_hub.ModelCard, "load", staticmethod(no_card))
    return lambda: [tmp_path / "hub" / repo for repo in uploads]


def fresh(folder):
    return random_scratchbert(num_hidden_layers=1)


def from_bert(folder):
    write_bert(folder / "bert", random_bert(num_hidden_layers=1), layer_norm="gamma", decoder="weight and bias")
    return ScratchBertForPreTraining.from_pretrained(folder / "bert")


def from_bert_with_the_caller_s_key_mapping(folder):
    bert = random_bert(num_hidden_layers=1)
    write_bert(folder / "bert", bert)
    tensors = load_file(folder / "bert" / "model.safetensors")
    write_weights(folder / "bert", {name.replace("bert.", "mine."): tensor for name, tensor in tensors.items()})
    return ScratchBertForPreTraining.from_pretrained(folder / "bert", key_mapping={r"^mine\.": "bert."})


def from_a_state_dict(folder):
    bert = random_bert(num_hidden_layers=1)
    return ScratchBertForPreTraining.from_pretrained(None, config=bert.config, state_dict=bert.state_dict())


def offloaded(folder):
    write_bert(folder / "bert", random_bert(num_hidden_layers=1))
    device_map = {"model.embeddings": "cpu", "model.encoder": "disk", "model.pooler": "disk", "lm_head": "cpu"}
    return ScratchBertForPreTraining.from_pretrained(
        folder / "bert", device_map={**device_map, "next_sentence_head": "cpu"}, offload_folder=str(folder / "offload")
    )


def from_our_own(folder, model_class=ScratchBertForPreTraining):
    fresh(folder).save_pretrained(folder / "ours")
    return model_class.from_pretrained(folder / "ours")


ORIGINS = {
    "new": fresh,
    "a BERT": from_bert,
    "a BERT, with the caller's key mapping": from_bert_with_the_caller_s_key_mapping,
    "a BERT, in another data type": lambda folder: from_bert(folder).to(torch.bfloat16),
    "a BERT, deep-copied": lambda folder: copy.deepcopy(from_bert(folder)),
    "a BERT, pickled": lambda folder: pickle.loads(pickle.dumps(from_bert(folder))),
    "a state dict": from_a_state_dict,
    "our own": from_our_own,
    "our own, by an Auto class": lambda folder: from_our_own(folder, transformers.AutoModelForPreTraining),
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_names_are_ours_wherever_a_model_came_from(tmp_path, origin):
    model = ORIGINS[origin](tmp_path)
    model.save_pretrained(tmp_path / "saved")
    assert set(stored(tmp_path / "saved")) == NAMES
    assert_ours(tmp_path / "saved", model)


def test_a_model_half_on_disk(tmp_path):
    model = offloaded(tmp_path)
    with pytest.warns(UserWarning, match="offloaded"):
        model.save_pretrained(tmp_path / "saved")
    assert set(stored(tmp_path / "saved")) == NAMES
    again = ScratchBertForPreTraining.from_pretrained(tmp_path / "saved")
    assert_same_outputs(again, random_bert(num_hidden_layers=1))


def save_in_shards(model, folder, hub):
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == NAMES


def save_with_a_trainer(model, folder, hub):
    row = {"input_ids": [5, 6], "labels": [5, 6], "next_sentence_label": 1}
    arguments = transformers.TrainingArguments(
        folder / "runs", max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, per_device_train_batch_size=2
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=[row] * 2)
    trainer.train()
    trainer.save_model(folder)
    (folder / "training_args.bin").unlink()
    # The checkpoints on the way are as good
    assert set(stored(folder / "runs" / "checkpoint-1")) == NAMES
    ScratchBertForPreTraining.from_pretrained(folder / "runs" / "checkpoint-1", verify=True)
    assert config_json(folder / "runs" / "checkpoint-1")["auto_map"] == AUTO_MAP


def save_with_accelerate(model, folder, hub):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    accelerator.unwrap_model(prepared).save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(prepared),
    )


def push(model, folder, hub):
    model.push_to_hub("someone/model")
    shutil.copytree(hub()[0], folder)


def push_while_saving(model, folder, hub):
    model.save_pretrained(folder.parent / "local", push_to_hub=True, repo_id="someone/other-name")
    assert hub()[0].name == "other-name"
    assert_ours(folder.parent / "local", model)
    shutil.copytree(hub()[0], folder)


def push_while_saving_under_the_folder_s_name(model, folder, hub):
    model.save_pretrained(folder.parent / "local", push_to_hub=True)
    assert hub()[0].name == "local"
    shutil.copytree(hub()[0], folder)


WAYS = {
    "plainly": lambda model, folder, hub: model.save_pretrained(folder),
    "to a str": lambda model, folder, hub: model.save_pretrained(f"{folder}/"),
    "in the original format": lambda model, folder, hub: model.save_pretrained(folder, save_original_format=True),
    "not in the original format": lambda model, folder, hub: model.save_pretrained(folder, save_original_format=False),
    "in shards": save_in_shards,
    "a state dict": lambda model, folder, hub: model.save_pretrained(folder, state_dict=model.state_dict()),
    "with Trainer": save_with_a_trainer,
    "a state dict, with Accelerate": save_with_accelerate,
    "compiled": lambda model, folder, hub: torch.compile(model).save_pretrained(folder),
    "in DataParallel": lambda model, folder, hub: nn.DataParallel(model).module.save_pretrained(folder),
    "pushed": push,
    "pushed while saving": push_while_saving,
    "pushed while saving, under the folder's name": push_while_saving_under_the_folder_s_name,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_names_are_ours_whichever_way_a_model_is_saved(tmp_path, hub, way):
    model = from_bert(tmp_path)
    WAYS[way](model, tmp_path / "saved", hub)
    assert set(stored(tmp_path / "saved")) == NAMES
    assert_ours(tmp_path / "saved", model)
    is_state_dict_given = way.startswith("a state dict")
    assert (tmp_path / "saved" / "probe.json").exists() != is_state_dict_given
    if not is_state_dict_given:
        assert_same_outputs(ScratchBertForPreTraining.from_pretrained(tmp_path / "saved", verify=True), model)


@pytest.mark.parametrize(
    ("head", "fields"),
    [
        *((head, {}) for head in BERTS),
        ("ForPreTraining", {"tie_word_embeddings": False}),
        ("ForMaskedLM", {"norm_first": True}),
        ("ForMaskedLM", {"position_embedding_type": "sinusoidal"}),
        ("ForMaskedLM", {"norm_first": True, "position_embedding_type": "sinusoidal", "tie_word_embeddings": False}),
        ("ForMaskedLM", {"is_decoder": True, "add_cross_attention": True}),
        ("ForMaskedLM", {"num_hidden_layers": 0}),
    ],
    ids=str,
)
def test_every_class_comes_back_as_it_was(tmp_path, head, fields):
    model = random_scratchbert(head, **fields)
    model.save_pretrained(tmp_path)
    again = assert_ours(tmp_path, model)
    assert {name: getattr(again.config, name) for name in fields} == fields
    if again.get_output_embeddings() is not None:
        is_tied = again.get_output_embeddings().weight is again.get_input_embeddings().weight
        assert is_tied == again.config.tie_word_embeddings


def test_saved_again_from_what_was_saved(tmp_path):
    model = from_bert(tmp_path)
    for generation in range(3):
        folder = tmp_path / f"saved {generation}"
        model.save_pretrained(folder)
        model = assert_ours(folder, model)
    assert_same_outputs(model, random_bert(num_hidden_layers=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_data_type_stays(tmp_path, dtype):
    model = random_scratchbert().to(dtype)
    model.save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in stored(tmp_path).values()} == {dtype}
    assert config_json(tmp_path)["dtype"] == str(dtype).removeprefix("torch.")
    assert ScratchBertForPreTraining.from_pretrained(tmp_path).dtype == dtype


# --- the tied matrix


def test_matrices_that_the_config_ties_and_the_checkpoint_did_not_stay_apart(tmp_path):
    bert = random_bert(tie_word_embeddings=False)
    bert.save_pretrained(tmp_path / "bert")
    change_config(tmp_path / "bert", tie_word_embeddings=True)
    model = ScratchBertForPreTraining.from_pretrained(tmp_path / "bert")
    assert_same_outputs(model, bert)
    model.save_pretrained(tmp_path / "ours")
    assert_same_outputs(ScratchBertForPreTraining.from_pretrained(tmp_path / "ours"), bert)
    model.save_as_bert(tmp_path / "out")
    assert_bert(tmp_path / "out", bert, "ForPreTraining")


# --- what lies in the folder already


def weights_in(folder):
    return {path.name for path in folder.iterdir() if path.name.startswith(("model.", "model-"))}


def test_stale_files_go(tmp_path):
    one, other = random_scratchbert(seed=1), random_scratchbert(seed=2)
    sizes = ["10KB", "50GB", "20KB", "50GB", "40KB", "10KB"]
    for turn, size in enumerate(sizes):
        model = (one, other)[turn % 2]
        model.save_pretrained(tmp_path, max_shard_size=size)
        assert_ours(tmp_path, model)
    assert len(weights_in(tmp_path)) > 3
    one.save_pretrained(tmp_path)
    assert weights_in(tmp_path) == {"model.safetensors"}


def test_variants_do_not_touch_one_another(tmp_path):
    plain, half = random_scratchbert(seed=1), random_scratchbert(seed=2).half()
    for plain_size, half_size in (("50GB", "50GB"), ("50GB", "10KB"), ("10KB", "10KB"), ("10KB", "50GB")):
        plain.save_pretrained(tmp_path, max_shard_size=plain_size)
        half.save_pretrained(tmp_path, variant="fp16", max_shard_size=half_size)
        for order in ((half, plain), (plain, half)):
            for model in order:
                kwargs = {} if model is plain else {"variant": "fp16"}
                size = plain_size if model is plain else half_size
                model.save_pretrained(tmp_path, max_shard_size=size, **kwargs)
            # config.json, which they share, has the data type of the one that was saved last.
            for model, variant in ((plain, None), (half, "fp16")):
                again = ScratchBertForPreTraining.from_pretrained(tmp_path, variant=variant, dtype=model.dtype)
                assert_same_outputs(again, model)


def test_other_files_stay(tmp_path):
    others = {"tokenizer.json": "{}", "vocab.txt": "[PAD]", "README.md": "mine", "adapter_model.safetensors": "x"}
    others |= {"optimizer.pt": "state", "modeling_other.py": "1"}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    random_scratchbert().save_pretrained(tmp_path)
    assert {name: (tmp_path / name).read_text() for name in others} == others
    expected = set(others) | CODE | {"config.json", "model.safetensors", "probe.json"}
    assert {path.name for path in tmp_path.iterdir()} == expected


@pytest.mark.parametrize("container", ["safetensors", "sharded safetensors", "bin"])
@pytest.mark.parametrize("way", ["save_pretrained", "save_as_bert"])
def test_over_the_folder_that_it_was_loaded_from(tmp_path, container, way):
    bert = random_bert()
    write_bert(tmp_path, bert, container)
    model = ScratchBertForPreTraining.from_pretrained(tmp_path)
    getattr(model, way)(tmp_path)
    getattr(model, way)(tmp_path)
    assert_same_outputs(model, bert)
    assert_same_outputs(ScratchBertForPreTraining.from_pretrained(tmp_path), bert)
    if container != "bin":
        assert weights_in(tmp_path) == {"model.safetensors"}


@pytest.mark.parametrize("way", ["save_pretrained", "save_as_bert"])
@pytest.mark.parametrize("size", ["50GB", "10KB"])
def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path, monkeypatch, way, size):
    old, new = random_scratchbert(seed=1), random_scratchbert(seed=2, norm_first=False, num_hidden_layers=3)
    old.save_pretrained(tmp_path, max_shard_size=size)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, calls = safetensors.torch.save_file, []

    def fail(tensors, filename, *args, **kwargs):
        calls.append(filename)
        if len(calls) == (1 if size == "50GB" or way == "save_as_bert" else 2):
            Path(filename).write_bytes(b"half of it")
            raise KeyboardInterrupt
        real(tensors, filename, *args, **kwargs)

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", fail)
    monkeypatch.setattr(modeling_scratchbert.bert.export, "save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        new.save_pretrained(tmp_path, max_shard_size=size) if way == "save_pretrained" else new.save_as_bert(tmp_path)
    assert calls
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert_same_outputs(ScratchBertForPreTraining.from_pretrained(tmp_path), old)


@pytest.mark.parametrize("way", ["save_pretrained", "save_as_bert"])
def test_a_file_is_no_folder(tmp_path, way):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file") as error:
        getattr(random_scratchbert(), way)(tmp_path / "model")
    assert str(tmp_path / "model") in str(error.value)
    assert (tmp_path / "model").read_text() == "mine"


@since("5.15", "weights are written by the main process only")
def test_only_the_main_process_writes_and_uploads(tmp_path, hub):
    model = random_scratchbert()
    model.save_pretrained(tmp_path / "saved", is_main_process=False)
    assert not list((tmp_path / "saved").glob("*"))
    model.save_pretrained(tmp_path / "saved", is_main_process=False, push_to_hub=True)
    assert hub() == []


def test_what_is_pushed_is_what_was_saved(tmp_path, hub):
    """A state_dict given by hand, as under FSDP where the model has but a part, is uploaded as well."""
    model, other = random_scratchbert(seed=1), random_scratchbert(seed=2)
    model.save_pretrained(tmp_path / "saved", state_dict=other.state_dict(), push_to_hub=True)
    assert_ours(tmp_path / "saved", other)
    assert_ours(hub()[0], other)


def test_saving_changes_nothing_of_the_model(tmp_path):
    model = random_scratchbert()
    config, before = model.config, copy.deepcopy(model.state_dict())
    model.train()
    model.save_pretrained(tmp_path / "ours")
    model.save_as_bert(tmp_path / "bert")
    assert model.training
    assert model.config is config
    assert config.model_type == "scratchbert"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.lm_head.decoder.weight is model.get_input_embeddings().weight


# --- as BERT


def assert_bert(folder, model, head):
    """The reference opens `folder` with no tensor missing or left over, and computes what `model` does."""
    reference, info = REFERENCES[head].from_pretrained(folder, output_loading_info=True)
    assert info == NOTHING
    assert_same_outputs(reference, model)


def canonical(folder, head, **fields):
    """The names under which `transformers` itself stores the reference."""
    REFERENCES[head](transformers.BertConfig(**TINY, **NEEDS.get(head, {}), **fields)).save_pretrained(folder)
    return set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("head", BERTS)
def test_as_bert_every_class_and_its_reference(tmp_path, head, tied):
    model = random_scratchbert(head, tie_word_embeddings=tied, num_labels=2)
    with logged_warnings() as warnings:
        model.save_as_bert(tmp_path)
        assert_bert(tmp_path, model, head)
    assert not warnings
    assert set(load_file(tmp_path / "model.safetensors")) == canonical(
        tmp_path / "reference", head, tie_word_embeddings=tied
    )


@pytest.mark.parametrize("fields", [{}, {"add_cross_attention": True}], ids=str)
def test_as_bert_a_decoder(tmp_path, fields):
    fields = {"is_decoder": True, **fields}
    model = random_scratchbert("Model", **fields)
    model.save_as_bert(tmp_path)
    assert_bert(tmp_path, model, "Model")
    assert set(load_file(tmp_path / "model.safetensors")) == canonical(tmp_path / "reference", "Model", **fields)
    for head in ("ForMaskedLM", "ForCausalLM"):
        causal = random_scratchbert(head, **fields)
        causal.save_as_bert(tmp_path / head)
        assert_bert(tmp_path / head, causal, "ForCausalLM")
    assert config_json(tmp_path / "ForCausalLM")["architectures"] == ["BertLMHeadModel"]
    assert (
        type(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ForCausalLM")) is REFERENCES["ForCausalLM"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", ["ForPreTraining", "ForTokenClassification", "ForCausalLM"])
def test_bert_in_and_bert_out_bit_for_bit(tmp_path, head, dtype):
    random_bert(head).to(dtype).save_pretrained(tmp_path / "in")
    model = OURS[head].from_pretrained(tmp_path / "in")
    model.save_pretrained(tmp_path / "between")
    OURS[head].from_pretrained(tmp_path / "between").save_as_bert(tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype == dtype
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
    ignored = {"transformers_version", "position_embedding_type"}
    before, after = (
        {name: value for name, value in config_json(tmp_path / folder).items() if name not in ignored}
        for folder in ("in", "out")
    )
    assert before == after


def test_as_bert_the_configuration_is_one_that_others_read(tmp_path):
    labels = {0: "no", 1: "yes", 2: "perhaps"}
    model = random_scratchbert(
        "ForSequenceClassification", id2label=labels, label2id={v: k for k, v in labels.items()}, layer_norm_eps=1e-5
    )
    model.save_pretrained(tmp_path / "before")  # which notes our own code in the configuration
    model.save_as_bert(tmp_path)
    fields = config_json(tmp_path)
    assert fields["model_type"] == "bert"
    assert fields["architectures"] == ["BertForSequenceClassification"]
    # Readers outside of transformers, CTranslate2's among them, take it from there
    assert fields["position_embedding_type"] == "absolute"
    assert fields["layer_norm_eps"] == 1e-5
    our_own = set(ScratchBertConfig().to_dict()) - set(transformers.BertConfig().to_dict())
    assert not {"auto_map", *our_own} & set(fields) - {"position_embedding_type"}
    assert "scratch" not in json.dumps(fields).lower()
    auto = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(auto) is REFERENCES["ForSequenceClassification"]
    assert auto.config.id2label == labels


def test_as_bert_the_file_is_one_that_others_read(tmp_path):
    """One safetensors file, marked as PyTorch's, contiguous, with nothing that shares memory; no code beside it."""
    model = random_scratchbert("ForMaskedLM")
    model.save_as_bert(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        names = list(file.keys())
        embeddings = file.get_tensor("bert.embeddings.word_embeddings.weight")
    assert embeddings.tobytes() == model.get_input_embeddings().weight.numpy(force=True).tobytes()
    assert not [name for name in names if "gamma" in name or "beta" in name]
    # A loader that knows no more than names
    reference = REFERENCES["ForMaskedLM"](transformers.BertConfig(**TINY))
    left_out = reference.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not left_out.unexpected_keys
    assert set(left_out.missing_keys) == {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert_same_outputs(reference.eval(), model)


def test_as_bert_whatever_the_config_says_of_tying(tmp_path):
    """The weights are tied while the model is made; the field may change later."""
    model = random_scratchbert("ForMaskedLM")
    model.config.tie_word_embeddings = False
    model.save_as_bert(tmp_path)
    assert_bert(tmp_path, model, "ForMaskedLM")


class WithMore(ScratchBertModel):
    """A class with a tensor that BERT does not have."""

    def __init__(self, config):
        super().__init__(config)
        self.more = nn.Linear(config.hidden_size, 2)
        self.post_init()


class OfItsOwn(ScratchBertPreTrainedModel):
    """A class that derives from no model that has a reference."""

    def __init__(self, config):
        super().__init__(config)
        self.model = ScratchBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, 2)
        self.post_init()


@pytest.mark.parametrize(
    ("model_class", "fields", "reason"),
    [
        (OURS["Model"], {"norm_first": True}, "norm_first is True"),
        (OURS["ForMaskedLM"], {"norm_first": True, "num_hidden_layers": 0}, "norm_first is True"),
        (OURS["ForMaskedLM"], {"position_embedding_type": "sinusoidal"}, "position_embedding_type is 'sinusoidal'"),
        (WithMore, {}, r"more\.weight"),
        (OfItsOwn, {}, "OfItsOwn is not a model"),
    ],
)
def test_as_bert_what_bert_cannot_express_is_refused(tmp_path, model_class, fields, reason):
    with pytest.raises(ValueError, match=rf"{reason}.*BERT.*save_pretrained"):
        model_class(tiny_config(**fields)).save_as_bert(tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Unchanged(ScratchBertForMaskedLM):
    """A subclass with no weight of its own."""


def test_as_bert_a_subclass_has_its_parent_s_reference(tmp_path):
    model = Unchanged(ScratchBertConfig(**TINY)).eval()
    model.save_as_bert(tmp_path)
    assert config_json(tmp_path)["architectures"] == ["BertForMaskedLM"]
    assert_same_outputs(REFERENCES["ForMaskedLM"].from_pretrained(tmp_path), model)


@pytest.mark.parametrize("way", ["save_pretrained", "save_as_bert"])
def test_whoever_may_read_one_file_may_read_all(tmp_path, way):
    """A folder is often shared between users."""
    (tmp_path / "mine.txt").write_text("as open() makes a file here")
    getattr(random_scratchbert(), way)(tmp_path / "saved")
    assert {path.stat().st_mode for path in (tmp_path / "saved").iterdir()} == {(tmp_path / "mine.txt").stat().st_mode}


def test_saving_says_nothing_when_all_is_well(tmp_path):
    model = from_bert(tmp_path)
    with logged_warnings() as warnings:
        model.save_pretrained(tmp_path / "ours")
        model.save_as_bert(tmp_path / "as bert")
    assert not warnings


def test_as_bert_the_number_of_blocks_is_that_of_the_model(tmp_path):
    """Some may have been removed since the configuration was made."""
    model = random_scratchbert("Model")
    model.encoder.blocks = model.encoder.blocks[:1]
    model.save_as_bert(tmp_path / "out")
    assert_same_outputs(REFERENCES["Model"].from_pretrained(tmp_path / "out"), model)


def test_as_bert_weights_that_are_not_here_are_refused(tmp_path):
    random_scratchbert("Model").save_pretrained(tmp_path / "saved")
    device_map = {"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}
    model = ScratchBertModel.from_pretrained(
        tmp_path / "saved", device_map=device_map, offload_folder=tmp_path / "disk"
    )
    with pytest.raises(ValueError, match=r"encoder.blocks.0.*device_map"):
        model.save_as_bert(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_saved_folder_has_the_files_that_the_documentation_lists(tmp_path):
    random_scratchbert().save_pretrained(tmp_path)
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("### Copied into every saved model")[2].partition("\n#")[0]
    code = set(re.findall(r"^\| `(\w+\.py)` \|", table, re.MULTILINE))
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert names == code | {"config.json", "model.safetensors", "probe.json"}
