"""`from_pretrained` and `from_bert`: a BERT checkpoint, written in any form, opens with the reference's outputs."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from modeling_scratchbert import (
    ScratchBertConfig,
    ScratchBertForConditionalGeneration,
    ScratchBertForPreTraining,
    ScratchBertModel,
    ScratchBertPreTrainedModel,
)
from support.checkpoint_kinds import (
    DECODER_BIAS,
    DECODER_WEIGHT,
    FORMS,
    NOTHING,
    OUTPUT_BIAS,
    assert_loads,
    assert_same_outputs,
    bert_tensors,
    load,
    two_bert_tensors,
    write_bert,
    write_hub_cache,
    write_two_berts,
    write_weights,
)
from support.models import BERTS, CROSSED, OURS, REFERENCES, TINY, random_bert, random_encoder_decoder

pytestmark = pytest.mark.usefixtures("offline")


# --- one BERT


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_forms(tmp_path, form, prefix):
    form = FORMS[form]
    dtype = form.get("dtype", torch.float32)
    write_bert(tmp_path, random_bert(), prefix=prefix, **form)
    model = assert_loads(tmp_path, random_bert().to(dtype))
    assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}


@pytest.mark.parametrize(
    ("head", "fields"),
    [
        ("Model", {"is_decoder": True}),
        ("Model", CROSSED),
        ("ForCausalLM", CROSSED),
        ("ForPreTraining", {"hidden_act": "prelu"}),  # an activation with a weight
        ("ForMaskedLM", {"num_hidden_layers": 11}),
    ],
)
def test_kinds_of_models(tmp_path, head, fields):
    bert = random_bert(head, **fields)
    write_bert(tmp_path, bert, "sharded legacy bin", layer_norm="gamma", decoder="weight and bias", position_ids=True)
    assert_loads(tmp_path, bert, head)


@pytest.fixture(scope="module")
def every_class(tmp_path_factory):
    """For every class, a checkpoint of BERT as `transformers` writes it, and ours; all have the same encoder."""
    folders = {}
    for head in BERTS:
        folder = tmp_path_factory.mktemp(head)
        random_bert(head, num_labels=3 if "Classification" in head else 2).save_pretrained(folder / "BERT")
        OURS[head].from_pretrained(folder / "BERT").save_pretrained(folder / "ScratchBert", max_shard_size="20KB")
        folders[head] = folder
    return folders


def names_in(model):
    """The names of its tensors without that of the encoder, and without the output matrix, which is tied."""
    return {name.removeprefix("model.") for name in model.state_dict()} - {"lm_head.decoder.weight"}


@pytest.mark.parametrize("kind", ["BERT", "ScratchBert"])
@pytest.mark.parametrize("loaded", BERTS)
@pytest.mark.parametrize("stored", BERTS)
def test_every_class_loads_the_checkpoints_of_every_class(every_class, stored, loaded, kind):
    kwargs = {"ignore_mismatched_sizes": True, **({"num_labels": 2} if loaded == "ForQuestionAnswering" else {})}
    ours, info, warnings = load(every_class[stored] / kind, loaded, **kwargs)
    source = every_class[stored] / "BERT"
    reference, reference_info = REFERENCES[loaded].from_pretrained(source, output_loading_info=True, **kwargs)
    stored_names = names_in(OURS[stored].from_pretrained(source))
    mismatched = {name for name, *_ in info["mismatched_keys"]}
    assert {name.removeprefix("model.") for name in info["missing_keys"]} == names_in(ours) - stored_names
    assert {name.removeprefix("model.") for name in info["unexpected_keys"]} == stored_names - names_in(ours)
    assert mismatched == {name for name, *_ in reference_info["mismatched_keys"]}
    new = info["missing_keys"] | mismatched
    assert all(name in warnings for name in new)
    assert not (warnings and stored == loaded)
    # A new head is random in both.
    assert_same_outputs(ours, reference, only="hidden_states" if new else "")


@pytest.mark.parametrize(
    ("lost", "kwargs", "missing"),
    [(".layer.1.", {}, r"blocks\.1\.(attention|feed_forward)"), ("nothing", CROSSED, "cross_attention")],
)
def test_missing_tensors_are_named(tmp_path, lost, kwargs, missing):
    write_bert(tmp_path)
    write_weights(tmp_path, {name: t for name, t in bert_tensors(random_bert()).items() if lost not in name})
    ours, info, warnings = load(tmp_path, **kwargs)
    assert info["missing_keys"] == {name for name in ours.state_dict() if re.search(missing, name)}
    assert info["missing_keys"]
    assert "MISSING" in warnings
    assert re.search(missing, warnings)


def test_a_missing_activation_starts_as_that_of_torch(tmp_path):
    write_bert(tmp_path, random_bert("Model", hidden_act="prelu"))
    model, _, _ = load(tmp_path, "ForMaskedLM")
    assert model.lm_head.activation.weight.item() == 0.25


def test_sizes_that_differ(tmp_path):
    """The vocabulary: the names are ours, and the output matrix stays tied."""
    write_bert(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(tmp_path, vocab_size=120)
    ours, info, warnings = load(tmp_path, vocab_size=120, ignore_mismatched_sizes=True)
    assert {"model.embeddings.word_embeddings.weight", "lm_head.decoder.bias"} <= {
        n for n, *_ in info["mismatched_keys"]
    }
    assert "word_embeddings" in warnings
    assert ours.lm_head.decoder.weight is ours.get_input_embeddings().weight
    assert 0.01 < ours.lm_head.decoder.weight.std() < 0.03  # initializer_range is 0.02
    assert not ours.lm_head.decoder.bias.any()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "left_out",
    [
        (),
        (DECODER_BIAS,),
        (OUTPUT_BIAS,),
        (DECODER_WEIGHT,),
        (DECODER_WEIGHT, DECODER_BIAS),
        (DECODER_BIAS, OUTPUT_BIAS),
    ],
)
@pytest.mark.parametrize("prefix", ["", "decoder."], ids=["one BERT", "two BERTs"])
def test_the_output_matrix_and_its_bias(tmp_path, prefix, left_out, tied):
    """The file has a matrix of its own, and two biases that differ, of which BERT computes with the decoder's."""
    untied = {"tie_word_embeddings": False}
    if prefix:
        bert, head = random_encoder_decoder(decoder=untied), "ForConditionalGeneration"
        write_two_berts(tmp_path, bert)
    else:
        bert, head = random_bert(**untied), "ForPreTraining"
        write_bert(tmp_path, bert)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"tie_word_embeddings": false', f'"tie_word_embeddings": {str(tied).lower()}')
    )
    tensors = {**bert.state_dict(), prefix + OUTPUT_BIAS: torch.randn(TINY["vocab_size"])}
    stored = {name: tensor for name, tensor in tensors.items() if name.removeprefix(prefix) not in left_out}
    write_weights(tmp_path, stored)
    ours, info, warnings = load(tmp_path, head)

    weight, bias = ours.lm_head.decoder.weight, ours.lm_head.decoder.bias
    embeddings = (ours.get_decoder() if prefix else ours).get_input_embeddings().weight
    missing = set()
    if DECODER_WEIGHT not in left_out:
        assert torch.equal(weight, tensors[prefix + DECODER_WEIGHT])
        assert ("NOT tie" in warnings) == tied
    elif tied:
        assert weight is embeddings
    else:
        missing.add("lm_head.decoder.weight")
    if {DECODER_BIAS, OUTPUT_BIAS} <= set(left_out):
        missing.add("lm_head.decoder.bias")
    else:
        assert torch.equal(bias, stored.get(prefix + DECODER_BIAS, tensors[prefix + OUTPUT_BIAS]))
    assert info["missing_keys"] == missing
    assert all(name in warnings for name in missing)


@pytest.mark.parametrize(
    ("stored", "kwargs", "expected"),
    [
        ({"dtype": None}, {}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float32"}, {}, torch.float32),
        ({}, {"dtype": "auto"}, torch.bfloat16),
        ({}, {"dtype": torch.float16}, torch.float16),
        ({}, {"torch_dtype": "float32"}, torch.float32),
    ],
)
def test_dtype(tmp_path, stored, kwargs, expected):
    write_bert(tmp_path, dtype=torch.bfloat16, fields=stored)
    ours = assert_loads(tmp_path, random_bert().to(torch.bfloat16).to(expected), **kwargs)
    seq2seq = ScratchBertForConditionalGeneration.from_bert(tmp_path, **kwargs)
    for model in (ours, seq2seq):
        assert {tensor.dtype for tensor in model.state_dict().values()} == {expected}


@pytest.mark.parametrize(
    ("pattern", "replacement", "key_mapping"),
    [
        (r"^bert\.", "mine.", {r"^mine\.": "bert."}),
        (r"^", "teacher.", {r"^teacher\.": ""}),
        (r"pooler\.dense", "first_token", {r"^bert\.first_token": "model.pooler.dense"}),
    ],
    ids=["part of the names", "all names", "into our names"],
)
def test_key_mapping(tmp_path, pattern, replacement, key_mapping):
    """The caller's patterns are applied before BERT's."""
    write_bert(tmp_path)
    tensors = bert_tensors(random_bert(), layer_norm="gamma")
    write_weights(tmp_path, {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()})
    assert_loads(tmp_path, random_bert(), key_mapping=key_mapping)


def test_names_that_resemble_those_of_bert(tmp_path):
    extra = {
        "xbert.pooler.dense.weight",
        "bert.bert.pooler.dense.weight",
        "bert.poolerXdense.weight",
        "bert.pooler.dense.weight.0",
        "bert.pooler.dense.weights",
        "bert.cls.predictions.decoder.weight",
        "bert.classifier.weight",
        "lm_head.dense_2.weight",
    }
    write_bert(tmp_path)
    write_weights(tmp_path, {**bert_tensors(random_bert()), **dict.fromkeys(extra, torch.ones(3))})
    ours, info, _ = load(tmp_path)
    assert info == {**NOTHING, "unexpected_keys": extra}
    assert_same_outputs(ours, random_bert())


# --- the configuration

GOOGLE = {
    **TINY,
    "attention_probs_dropout_prob": 0.1,
    "directionality": "bidi",
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
    "type_vocab_size": 2,
}
BERT_TYPE = {**TINY, "model_type": "bert"}


@pytest.mark.parametrize(
    "fields",
    [
        GOOGLE,  # the bert_config.json of 2018, which many folders on the Hub have as their config.json
        BERT_TYPE,
        {**TINY, "architectures": ["BertForPreTraining"]},
        {**TINY, "architectures": ["BertForSomeTaskOfMine"], "model_type": None},
        {**BERT_TYPE, "position_embedding_type": "absolute"},
        {**BERT_TYPE, "position_embedding_type": None},
    ],
    ids=["Google", "model_type", "architectures", "own architecture", "absolute positions", "null"],
)
def test_configurations(tmp_path, fields):
    write_bert(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for config in (None, transformers.BertConfig(**TINY), ScratchBertConfig(**TINY)):
        assert_loads(tmp_path, random_bert(), config=config)


CALLER_CONFIGS = {
    "BertConfig": lambda folder: transformers.BertConfig(**TINY, num_labels=4),
    "ScratchBertConfig": lambda folder: ScratchBertConfig(**TINY, num_labels=4),
    "ScratchBertConfig.from_pretrained": ScratchBertConfig.from_pretrained,
    "folder": lambda folder: folder,
    "file": lambda folder: str(folder / "config.json"),
}


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize("kind", CALLER_CONFIGS)
def test_the_configuration_of_the_caller(tmp_path, kind, has_config):
    write_bert(tmp_path / "four labels", fields={"id2label": dict.fromkeys(range(4), "label")})
    config = CALLER_CONFIGS[kind](tmp_path / "four labels")
    before = str(config)
    folder = write_bert(tmp_path / "model")
    if not has_config:
        (folder / "config.json").unlink()
    ours, info, _ = load(folder, "ForSequenceClassification", config=config)
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert ours.classifier.weight.shape == (4, 32)
    assert type(ours.config) is ScratchBertConfig
    assert str(config) == before
    assert_same_outputs(ours, random_bert(), only="hidden_states")


def test_an_auto_class_with_our_configuration_opens_a_bert(tmp_path):
    write_bert(tmp_path)
    config = ScratchBertConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForPreTraining.from_pretrained(tmp_path, config=config)
    assert type(model) is ScratchBertForPreTraining
    assert_same_outputs(model, random_bert())


# --- where a checkpoint is

FOLDER, HUB = "user/my model, v2.0 (best)", {"cache_dir": "cache"}
LOCATIONS = [
    # source, arguments, seed of the weights
    (FOLDER, {}, 1),
    (Path(FOLDER), {}, 1),
    (f"{FOLDER}/", {"device_map": "cpu"}, 1),
    (FOLDER, {"device_map": "auto"}, 1),
    (FOLDER, {"use_safetensors": True}, 1),
    (FOLDER, {"use_safetensors": False}, 2),
    (FOLDER, {"variant": "best"}, 3),
    (FOLDER, {"subfolder": "inner"}, 4),
    (FOLDER, {"subfolder": "inner", "use_safetensors": False}, 5),
    ("someone/a-model", HUB, 1),
    ("someone/a-model", {**HUB, "revision": "v2", "local_files_only": True}, 1),
    ("someone/a-model", {**HUB, "subfolder": "inner"}, 4),
]


@pytest.fixture(scope="module")
def locations(tmp_path_factory):
    """For one BERT and for two, a folder with files of several weights, and a copy of it in the cache of the Hub."""
    roots = {}
    kinds = {"one BERT": (write_bert, bert_tensors, random_bert)}
    kinds["two BERTs"] = (write_two_berts, two_bert_tensors, random_encoder_decoder)
    for kind, (write, tensors_of, random_model) in kinds.items():
        root = tmp_path_factory.mktemp("locations")
        folder = root / FOLDER
        write(folder, random_model(seed=1))
        write_weights(folder, tensors_of(random_model(seed=9)), "sharded safetensors")
        write_weights(folder, tensors_of(random_model(seed=2)), "bin")
        write_weights(folder, tensors_of(random_model(seed=3)), "sharded safetensors", variant="best")
        write(folder / "inner", random_model(seed=4), "sharded safetensors")
        write_weights(folder / "inner", tensors_of(random_model(seed=5)), "sharded bin")
        write_hub_cache(root / "cache", "someone/a-model", folder, revisions=("main", "v2"))
        roots[kind] = root
    return roots


@pytest.mark.parametrize("opened_with", ["from_pretrained", "two BERTs", "from_bert"])
@pytest.mark.parametrize(("source", "kwargs", "seed"), LOCATIONS, ids=str)
def test_locations(locations, monkeypatch, opened_with, source, kwargs, seed):
    if opened_with == "two BERTs":
        monkeypatch.chdir(locations["two BERTs"])
        assert_loads(source, random_encoder_decoder(seed=seed), "ForConditionalGeneration", **kwargs)
        return
    monkeypatch.chdir(locations["one BERT"])
    if opened_with == "from_pretrained":
        assert_loads(source, random_bert(seed=seed), **kwargs)
        return
    model = ScratchBertForConditionalGeneration.from_bert(source, **kwargs)
    assert_same_outputs(model.get_encoder(), random_bert(seed=seed).bert, only="hidden_states")


def test_only_the_file_that_is_loaded_is_read(tmp_path):
    write_bert(tmp_path, container="bin")
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert_loads(tmp_path, random_bert(), use_safetensors=False)


def test_state_dicts():
    bert, two_berts = random_bert(), random_encoder_decoder()
    original = {"layer_norm": "gamma", "decoder": "weight and bias"}
    for config in (bert.config, ScratchBertConfig(**TINY)):
        for tensors in (bert.state_dict(), bert_tensors(bert, prefix=False, **original)):
            ours = assert_loads(None, bert, config=config, state_dict=tensors)
    assert_loads(None, bert, config=ours.config, state_dict=ours.state_dict())
    for tensors in (two_berts.state_dict(), two_bert_tensors(two_berts, **original)):
        assert_loads(None, two_berts, "ForConditionalGeneration", config=two_berts.config, state_dict=tensors)


# --- classes of the user's own


class EncoderWithAnotherName(ScratchBertPreTrainedModel):
    """As most classes that people derived from BERT's are written."""

    base_model_prefix = "bert"

    def __init__(self, config):
        super().__init__(config)
        self.bert = ScratchBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, *args, **kwargs):
        return self.bert(*args, **kwargs)


@pytest.mark.parametrize("prefix", [True, False])
def test_an_encoder_with_another_name(tmp_path, prefix):
    bert = random_bert("Model")
    write_bert(tmp_path / "bert", bert, prefix=prefix)
    model, info = EncoderWithAnotherName.from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert info == {**NOTHING, "missing_keys": {"classifier.weight", "classifier.bias"}}
    assert_same_outputs(model, bert)
    model.save_pretrained(tmp_path / "ours")
    again, info = EncoderWithAnotherName.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert info == NOTHING
    assert_same_outputs(again, bert)


class NamesOfBert(ScratchBertForPreTraining):
    """Modules of its own have names that modules of BERT have."""

    def __init__(self, config):
        super().__init__(config)
        self.distance_embedding = nn.Embedding(3, config.hidden_size)
        self.crossattention = nn.Linear(config.hidden_size, 2)
        self.cls = nn.ModuleDict({"seq_relationship": nn.Linear(config.hidden_size, 2)})
        self.post_init()


def test_names_in_a_checkpoint_of_our_own_are_not_changed(tmp_path):
    model = NamesOfBert(ScratchBertConfig(**TINY))
    model.save_pretrained(tmp_path)
    again, info = NamesOfBert.from_pretrained(tmp_path, output_loading_info=True)
    assert info == NOTHING
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
