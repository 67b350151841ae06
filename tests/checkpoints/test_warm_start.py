"""`from_bert`: an encoder and a decoder that start from one BERT, tensor for tensor."""

import json
import re

import pytest
import torch
import transformers
from torch.testing import assert_close

from modeling_scratchbert import ScratchBertConfig, ScratchBertForConditionalGeneration
from modeling_scratchbert.bert.names import to_scratchbert
from support.checkpoint_kinds import (
    CONTAINERS,
    DECODER_BIAS,
    DECODER_WEIGHT,
    OUTPUT_BIAS,
    assert_same_outputs,
    bert_tensors,
    every_form,
    logged_warnings,
    weight_files,
    write_bert,
    write_hub_cache,
    write_weights,
)
from support.models import TINY, random_bert, random_encoder_decoder, random_scratchbert
from support.refusals import assert_mentions, refusal

pytestmark = pytest.mark.usefixtures("offline")

IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])
MASK = (IDS != 0).long()
START_AND_END = {"decoder_start_token_id": 2, "eos_token_id": 3}  # of a vocabulary too small for Google's
CROSS_ATTENTION = 10  # tensors of a block


def start(source, **kwargs):
    """The model, what it reports of the loading, and what it warns of."""
    with logged_warnings() as warnings:
        model, info = ScratchBertForConditionalGeneration.from_bert(source, output_loading_info=True, **kwargs)
    return model, info, "\n".join(warnings)


def tensors_of(model) -> dict[str, torch.Tensor]:
    """By our names, as in a model with a head; `model` is a `Bert…` or one of ours."""
    kind = "scratchbert" if hasattr(model.config, "norm_first") else "bert"
    return {to_scratchbert(name, kind): tensor for name, tensor in model.state_dict().items()}


def origin_of(name):
    """The name in a model of one half of what starts this tensor of the seq2seq model, if there is such a thing."""
    if name.startswith("model.encoder.") and ".cross_attention" in name:
        return None
    return re.sub(r"^model\.(encoder|decoder)\.", "model.", name)


def assert_started(model, info, source: dict[str, torch.Tensor]) -> set[str]:
    """Every tensor for which the source has one is that, bit for bit; exactly the others are reported as missing. What
    is tied to a tensor that the source has is none of them. Returns the others."""
    tensors = model.state_dict(keep_vars=True)
    known = {name for name in tensors if origin_of(name) in source}
    for name in known:
        assert torch.equal(tensors[name], source[origin_of(name)]), name
    started = {id(tensors[name]) for name in known}
    new = {name for name, tensor in tensors.items() if id(tensor) not in started}
    assert info["missing_keys"] == new
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert not any(tensor.is_meta or tensor.isnan().any() for tensor in tensors.values())
    # Equal is not the same: what is not tied has memory of its own, or training would change both
    parameters = {id(tensor): tensor.data_ptr() for tensor in tensors.values()}
    assert len(set(parameters.values())) == len(parameters)
    return new


def kinds(names):
    return {"cross-attention" if ".cross_attention" in name else name.partition(".")[0] for name in names}


# --- every kind of checkpoint

WITH_CROSS = {"is_decoder": True, "add_cross_attention": True}
SOURCES = {
    "BertModel": (random_bert, "Model", {}),
    "BertForMaskedLM": (random_bert, "ForMaskedLM", {}),
    "BertForMaskedLM, untied": (random_bert, "ForMaskedLM", {"tie_word_embeddings": False}),
    "BertForPreTraining": (random_bert, "ForPreTraining", {}),
    "BertForSequenceClassification": (random_bert, "ForSequenceClassification", {}),
    "BertForQuestionAnswering": (random_bert, "ForQuestionAnswering", {}),
    "BertLMHeadModel": (random_bert, "ForCausalLM", {}),
    "BertLMHeadModel, with cross-attention": (random_bert, "ForCausalLM", WITH_CROSS),
    "BertModel, with cross-attention": (random_bert, "Model", WITH_CROSS),
    "BertForMaskedLM, an activation with a weight": (random_bert, "ForMaskedLM", {"hidden_act": "prelu"}),
    "ScratchBertModel": (random_scratchbert, "Model", {}),
    "ScratchBertForPreTraining": (random_scratchbert, "ForPreTraining", {}),
    "ScratchBertForCausalLM, with cross-attention": (random_scratchbert, "ForCausalLM", WITH_CROSS),
    "ScratchBertForMaskedLM, pre-norm": (
        random_scratchbert,
        "ForMaskedLM",
        {"norm_first": True, "position_embedding_type": "sinusoidal"},
    ),
}
ALONE = {"share_embeddings": False}  # so that a decoder without its embeddings would show


@pytest.mark.parametrize("fields", [ALONE, {}, {"tie_encoder_decoder": True}], ids=["apart", "shared", "tied"])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_tensor_that_the_source_has_starts_both_halves(tmp_path, kind, fields):
    make, head, own = SOURCES[kind]
    source = make(head, **own)
    source.save_pretrained(tmp_path)
    model, info, warnings = start(tmp_path, **START_AND_END, **fields)
    assert type(model) is ScratchBertForConditionalGeneration
    assert not model.training
    new = assert_started(model, info, tensors_of(source))
    expected = set() if own.get("add_cross_attention") else {"cross-attention"}
    assert kinds(new) == expected | (set() if "LM" in head or head == "ForPreTraining" else {"lm_head"})
    if new:  # transformers abbreviates "{0, 1}" where a number alone differs
        assert all(re.sub(r"\d", "{0, 1}", name) in warnings for name in new)
    else:
        assert not warnings
    for name, value in fields.items():
        assert getattr(model.config, name) == value
    # The encoder computes what the source does, as far as that looks both ways.
    if not source.config.is_decoder:
        encoded = model.get_encoder()(IDS, MASK).last_hidden_state
        expected = source.base_model(IDS, MASK).last_hidden_state
        assert_close(encoded[MASK.bool()], expected[MASK.bool()], rtol=0, atol=1e-5)
    model.generate(IDS, attention_mask=MASK, max_new_tokens=3)  # with no further setting


def test_a_decoder_with_its_cross_attention_goes_on_as_it_was(tmp_path):
    """Nothing of it is new: under its own encoder's output it predicts what it did."""
    source = random_bert("ForCausalLM", **WITH_CROSS)
    source.save_pretrained(tmp_path)
    model, info, warnings = start(tmp_path)
    assert not info["missing_keys"]
    assert not warnings
    encoded = model.get_encoder()(IDS, MASK).last_hidden_state
    expected = source(IDS, encoder_hidden_states=encoded, encoder_attention_mask=MASK).logits
    assert_close(model(IDS, MASK, IDS).logits, expected, rtol=0, atol=1e-5)


def test_a_real_bert(real_bert):
    reference = transformers.BertModel.from_pretrained(real_bert)
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_bert)
    model, info, _ = start(real_bert)
    assert_started(model, info, {name: t.to(model.dtype) for name, t in tensors_of(reference).items()})
    config = model.config
    assert config.decoder_start_token_id == tokenizer.cls_token_id == 101
    assert config.eos_token_id == tokenizer.sep_token_id == 102
    assert config.pad_token_id == tokenizer.pad_token_id == 0
    batch = tokenizer(["A museum in Lisbon.", "It opens at nine o'clock."], padding=True, return_tensors="pt")
    with torch.no_grad():
        encoded = model.get_encoder()(**batch).last_hidden_state
        real = batch["attention_mask"].bool()
        assert_close(encoded[real], reference(**batch).last_hidden_state[real], rtol=0, atol=1e-5)
        written = model.generate(**batch, max_new_tokens=4)
    assert written.shape[0] == 2
    assert (written[:, 0] == 101).all()


@every_form(prefix=(True, False))
def test_every_form_of_a_bert(tmp_path, form):
    form = dict(form)
    container, dtype = form.pop("container"), form["dtype"]
    bert = random_bert()
    write_bert(tmp_path, bert, container, fields={"dtype": str(dtype).removeprefix("torch.")}, **form)
    model, info, _ = start(tmp_path)
    assert model.dtype == dtype
    assert kinds(assert_started(model, info, tensors_of(bert.to(dtype)))) == {"cross-attention"}


@pytest.mark.parametrize("kwargs", [{}, {"max_shard_size": "20KB"}], ids=["one file", "shards"])
def test_a_scratchbert_that_came_from_a_bert(tmp_path, kwargs):
    bert = random_bert("ForMaskedLM")
    bert.save_pretrained(tmp_path / "bert")
    own = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "bert", config=ScratchBertConfig.from_pretrained(tmp_path / "bert")
    )
    own.save_pretrained(tmp_path / "own", **kwargs)
    model, info, _ = start(tmp_path / "own")
    assert_started(model, info, tensors_of(bert))
    assert_same_outputs(model.get_encoder(), bert.bert, only="hidden_states", tolerance=1e-5)


def test_a_hub_id_a_subfolder_a_variant_and_a_device_map(tmp_path):
    folder = write_bert(tmp_path / "folder", random_bert("ForMaskedLM", seed=1))
    write_bert(folder / "inner", random_bert("ForMaskedLM", seed=2), "sharded bin")
    write_weights(folder, bert_tensors(random_bert("ForMaskedLM", seed=3)), variant="best")
    write_hub_cache(tmp_path, "someone/a-bert", folder, revisions=("main", "v2"))
    for source, kwargs, seed in (
        (folder, {}, 1),
        (folder, {"device_map": "cpu"}, 1),
        (str(folder), {"subfolder": "inner"}, 2),
        (folder, {"variant": "best"}, 3),
        ("someone/a-bert", {"cache_dir": tmp_path}, 1),
        ("someone/a-bert", {"cache_dir": tmp_path, "revision": "v2", "local_files_only": True}, 1),
        ("someone/a-bert", {"cache_dir": tmp_path, "subfolder": "inner"}, 2),
    ):
        model, info, _ = start(source, **kwargs)
        assert_started(model, info, tensors_of(random_bert("ForMaskedLM", seed=seed)))


@pytest.mark.parametrize("first", [OUTPUT_BIAS, DECODER_BIAS])
def test_of_two_output_biases_the_reference_s_counts(tmp_path, first):
    """In whichever order they stand in the file, as in `from_pretrained`."""
    bert = random_bert("ForMaskedLM", tie_word_embeddings=False)
    tensors = bert.state_dict()
    tensors[OUTPUT_BIAS] = torch.randn(TINY["vocab_size"])
    write_bert(tmp_path, bert, "bin")
    write_weights(tmp_path, {first: tensors.pop(first), **tensors}, "bin")
    model, _, _ = start(tmp_path)
    assert torch.equal(model.lm_head.decoder.bias, bert.state_dict()[DECODER_BIAS])
    assert torch.equal(model.lm_head.decoder.weight, tensors[DECODER_WEIGHT])


# --- what the caller may choose


@pytest.mark.parametrize("fields", [ALONE, {}, {"norm_first": True}], ids=["apart", "shared", "pre-norm"])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_decoder_of_another_depth_takes_the_first_blocks_or_has_more(tmp_path, layers, fields):
    source = random_scratchbert("ForMaskedLM", norm_first=fields.get("norm_first", False))
    source.save_pretrained(tmp_path)
    model, info, warnings = start(tmp_path, num_decoder_layers=layers, **fields)
    new = assert_started(model, info, tensors_of(source))
    assert len(model.get_decoder().encoder.blocks) == layers
    assert len(model.get_encoder().encoder.blocks) == 2
    blocks = {int(re.search(r"blocks\.(\d+)", name)[1]) for name in new if ".cross_attention" not in name}
    assert blocks == set(range(2, layers))
    assert len([name for name in new if ".cross_attention" in name]) == layers * CROSS_ATTENTION
    assert "MISSING" in warnings
    model.generate(IDS, attention_mask=MASK, max_new_tokens=2, decoder_start_token_id=2)


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["tie_encoder_decoder", "share_embeddings", "tie_word_embeddings"])
def test_what_is_to_be_tied_is(tmp_path, name, tied, head):
    source = random_bert(head)
    source.save_pretrained(tmp_path)
    model, info, _ = start(tmp_path, **{name: tied})
    assert_started(model, info, tensors_of(source))
    encoder, decoder = model.get_encoder(), model.get_decoder()
    assert getattr(model.config, name) is tied
    same = {
        "tie_encoder_decoder": encoder.encoder.blocks[1].attention.query.weight
        is decoder.encoder.blocks[1].attention.query.weight,
        "share_embeddings": encoder.embeddings.norm.bias is decoder.embeddings.norm.bias,
        "tie_word_embeddings": model.lm_head.decoder.weight is decoder.get_input_embeddings().weight,
    }
    assert same == {"tie_encoder_decoder": False, "share_embeddings": True, "tie_word_embeddings": True, name: tied}
    # It is a checkpoint of its own from now on
    model.save_pretrained(tmp_path / "ours")
    again, info = ScratchBertForConditionalGeneration.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    assert_same_outputs(again, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16", "auto", None], ids=str)
def test_a_data_type(tmp_path, dtype):
    write_bert(tmp_path, dtype=torch.bfloat16, fields={"dtype": "bfloat16"})
    model, _, _ = start(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    wanted = torch.float16 if dtype == "float16" else torch.bfloat16
    assert {tensor.dtype for tensor in model.state_dict().values()} == {wanted}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_and_other_fields(tmp_path, attention):
    write_bert(tmp_path)
    model, _, _ = start(tmp_path, attn_implementation=attention, hidden_dropout_prob=0.25, bos_token_id=7)
    for part in (model, model.get_encoder(), model.get_decoder()):
        assert part.config._attn_implementation == attention
        assert part.config.hidden_dropout_prob == 0.25
    assert model.get_decoder().encoder.blocks[0].dropout.p == 0.25
    assert model.config.decoder_start_token_id == model.config.bos_token_id == 7


# --- the ids that it starts, ends and pads with


def add_tokenizer(folder, words=("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), **special):
    words = [*words, *(f"w{i}" for i in range(TINY["vocab_size"] - len(words)))]
    transformers.BertTokenizer(vocab={w: i for i, w in enumerate(words)}, **special).save_pretrained(folder)


def special_ids(config):
    return {name: getattr(config, name) for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id")}


def ids(start, end, pad):
    return {"decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": pad}


OTHER_WORDS = ("w", "[SEP]", "x", "[PAD]", "[CLS]", "y", "[UNK]", "[MASK]")


@pytest.mark.parametrize(
    ("words", "fields", "arguments", "wanted"),
    [
        (None, {}, {}, ids(None, None, 0)),
        (None, {"bos_token_id": 8, "eos_token_id": 9, "pad_token_id": 5}, {}, ids(8, 9, 5)),
        (None, {"vocab_size": 103}, {}, ids(101, 102, 0)),
        (OTHER_WORDS, {}, {}, ids(4, 1, 3)),
        (OTHER_WORDS, {"bos_token_id": 8, "eos_token_id": 9, "pad_token_id": 5}, {}, ids(4, 1, 3)),
        (OTHER_WORDS, {"bos_token_id": 8}, ids(11, 12, 13), ids(11, 12, 13)),
        (OTHER_WORDS, {"vocab_size": 103}, {"eos_token_id": [1, 6]}, ids(4, [1, 6], 3)),
    ],
    ids=["nothing", "config", "default", "tokenizer", "tokenizer and config", "arguments", "an argument"],
)
def test_the_special_ids_are_the_tokenizer_s_or_else_the_config_s(tmp_path, words, fields, arguments, wanted):
    random_bert("ForMaskedLM", **fields).save_pretrained(tmp_path)
    if words:
        add_tokenizer(tmp_path, words)
    model, _, _ = start(tmp_path, **arguments)
    assert special_ids(model.config) == special_ids(model.generation_config) == wanted
    assert model.get_decoder().get_input_embeddings().padding_idx == wanted["pad_token_id"]
    if wanted["decoder_start_token_id"] is None:
        with pytest.raises(ValueError, match="decoder_start_token_id is None"):
            model.generate(IDS, max_new_tokens=2)
        return
    # Nothing else has to be set, neither for generating nor for training, nor once it is saved and opened again.
    model.save_pretrained(tmp_path / "ours")
    again = ScratchBertForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert special_ids(again.config) == special_ids(again.generation_config) == wanted
    for each in (model, again):
        written = each.generate(IDS, max_new_tokens=4)
        assert (written[:, 0] == wanted["decoder_start_token_id"]).all()
        assert each(IDS, labels=IDS).loss.isfinite()


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.txt"])
def test_a_tokenizer_of_either_form(tmp_path, file):
    write_bert(tmp_path)
    add_tokenizer(tmp_path, OTHER_WORDS)
    if file == "vocab.txt":
        vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
        (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)))
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "tokenizer_config.json").unlink()
    model, _, _ = start(tmp_path)
    assert special_ids(model.config) == ids(4, 1, 3)


# --- what it refuses


def assert_refused(source, *parts, error=ValueError, **kwargs):
    assert_mentions(refusal(ScratchBertForConditionalGeneration.from_bert, source, error=error, **kwargs), *parts)


@pytest.mark.parametrize("kind", ["Roberta", "Electra"])
def test_another_model_is_refused(tmp_path, kind):
    fields = {"embedding_size": 32} if kind == "Electra" else {}
    config = getattr(transformers, f"{kind}Config")(**TINY, **fields)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    assert_refused(tmp_path, tmp_path, repr(config.model_type), "'bert'")


def test_what_has_two_halves_already_is_refused(tmp_path):
    random_scratchbert("ForConditionalGeneration").save_pretrained(tmp_path / "ours")
    random_encoder_decoder().save_pretrained(tmp_path / "theirs")
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        assert_refused(folder, folder, "an encoder and a decoder", "from_pretrained")


@pytest.mark.parametrize(
    ("file", "words"), [("config.json", "config.json"), ("model.safetensors", "no file of weights")]
)
def test_a_folder_without_a_configuration_or_weights_is_refused(tmp_path, file, words):
    write_bert(tmp_path)
    (tmp_path / file).unlink()
    assert_refused(tmp_path, tmp_path, words, error=OSError)


def test_a_folder_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source in ("nowhere", "no/where", tmp_path / "nowhere"):
        assert_refused(source, error=OSError, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("fields", "arguments", "words"),
    [
        ({"position_embedding_type": "relative_key"}, {}, ("'relative_key'", "absolute")),
        ({}, {"num_decoder_layers": 0}, ("num_decoder_layers is 0",)),
        ({}, {"tie_encoder_decoder": True, "num_decoder_layers": 1}, ("num_decoder_layers is 1",)),
        ({}, {"decoder_start_token_id": 99}, ("0 to 98",)),
        ({}, {"hidden_act": "geluu"}, ("'gelu'",)),
    ],
    ids=str,
)
def test_unfit_fields_are_refused(tmp_path, fields, arguments, words):
    write_bert(tmp_path, fields=fields)
    assert_refused(tmp_path, *words, **arguments)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_truncated_file_is_refused(tmp_path, container):
    write_bert(tmp_path, container=container)
    file = weight_files(tmp_path)[-1]
    file.write_bytes(file.read_bytes()[:1000])
    assert_refused(tmp_path, file, error=OSError)


@pytest.mark.parametrize("before", ["module.", "roberta.", "model.bert."])
def test_weights_under_foreign_names_are_refused(tmp_path, before):
    """They would leave every weight random."""
    write_bert(tmp_path)
    tensors = {before + name: tensor for name, tensor in bert_tensors(random_bert()).items()}
    write_weights(tmp_path, tensors)
    assert_refused(tmp_path, tmp_path, min(tensors))


@pytest.mark.parametrize("foreign", ["attention.self.distance_embedding.weight", "attention.self.Wqkv.weight"])
def test_blocks_of_another_make_are_refused(tmp_path, foreign):
    write_bert(tmp_path)
    name = f"bert.encoder.layer.0.{foreign}"
    write_weights(tmp_path, {**bert_tensors(random_bert()), name: torch.zeros(3)})
    assert_refused(tmp_path, tmp_path, name)
