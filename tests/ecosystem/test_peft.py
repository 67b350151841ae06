"""PEFT's methods on our models beside BERT; and of LoRA what is trained, saved, opened again and merged."""

from functools import partial
from inspect import signature

import pytest
import torch

pytest.importorskip("peft", reason="PEFT is not installed")

import peft
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from peft.utils import constants
from transformers import BertModel

from modeling_scratchbert.bert.names import to_scratchbert
from support.models import (
    NO_DROPOUT,
    OURS,
    SPECIAL,
    TINY,
    inputs_for,
    random_bert,
    random_encoder_decoder,
    random_scratchbert,
)

pytestmark = pytest.mark.filterwarnings("ignore:Unable to fetch remote file")

CLASSIFIER, SEQ2SEQ = "ForSequenceClassification", "ForConditionalGeneration"
# PEFT's name for what each class does, where it has one.
TASKS = {
    "Model": "FEATURE_EXTRACTION",
    "ForMaskedLM": None,
    "ForMultipleChoice": None,
    CLASSIFIER: "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForCausalLM": "CAUSAL_LM",
    SEQ2SEQ: "SEQ_2_SEQ_LM",
}


@torch.no_grad()
def scores(model, head: str) -> torch.Tensor:
    torch.manual_seed(1)
    inputs = inputs_for(head)
    del inputs["token_type_ids"]  # PeftModelForQuestionAnswering does not hand them on
    return model.eval()(**inputs)[0]


def save(folder, head: str):
    """Saves one of our models. Returns the folder."""
    random_scratchbert(head, **SPECIAL, **NO_DROPOUT).save_pretrained(folder)
    return folder


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", TASKS)
def test_adapters_are_saved_opened_and_merged(head, tmp_path):
    folder, own = save(tmp_path / "base", head), OURS[head]
    before = scores(own.from_pretrained(folder), head)
    adapted = get_peft_model(own.from_pretrained(folder), LoraConfig(task_type=TASKS[head], init_lora_weights=False))
    expected = scores(adapted, head)
    assert (expected - before).abs().max() > 0.1
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(own.from_pretrained(folder), tmp_path / "adapter")
    assert_same(scores(again, head), expected)
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_same(scores(own.from_pretrained(tmp_path / "merged"), head), expected)


def test_a_trained_adapter_and_its_head_open_in_every_way(tmp_path):
    folder, own, adapter = save(tmp_path / "base", CLASSIFIER), OURS[CLASSIFIER], tmp_path / "adapter"
    config = LoraConfig(task_type="SEQ_CLS", modules_to_save=["classifier"])
    model, losses = train(own.from_pretrained(folder), config, labelled(CLASSIFIER), steps=8)
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(adapter)
    expected = scores(model, CLASSIFIER)
    fresh, loaded = own.from_pretrained(folder), own.from_pretrained(folder)
    with torch.no_grad():
        fresh.classifier.weight.zero_()  # the adapter brings the head that it was trained with
    loaded.load_adapter(str(adapter))
    opened = (
        PeftModel.from_pretrained(fresh, adapter),
        AutoPeftModelForSequenceClassification.from_pretrained(str(adapter), trust_remote_code=True),
        own.from_pretrained(adapter),
        loaded,
        model.merge_and_unload().optimize_for_inference(),
    )
    for each in opened:
        assert_same(scores(each, CLASSIFIER), expected)


# ------------------------------------------------------------------------------------------------ every method

# Each with a configuration that names no layers, and no sizes of the model.
METHODS = {
    "LoRA": partial(LoraConfig, r=4, init_lora_weights=False),
    "DoRA": partial(LoraConfig, r=4, use_dora=True),
    "IA3": peft.IA3Config,
    "OFT": partial(peft.OFTConfig, oft_block_size=4),
    "AdaLoRA": partial(peft.AdaLoraConfig, init_r=6, target_r=5, total_step=3, tinit=0, tfinal=1, deltaT=1),
    "VeRA": partial(peft.VeraConfig, r=4),
    "prefix": partial(peft.PrefixTuningConfig, num_virtual_tokens=3),
    "prompt": partial(peft.PromptTuningConfig, num_virtual_tokens=3),
    "p-tuning": partial(peft.PromptEncoderConfig, num_virtual_tokens=3, encoder_hidden_size=8),
}
SIZES = {
    "token_dim": TINY["hidden_size"],
    "num_layers": TINY["num_hidden_layers"],
    "num_attention_heads": TINY["num_attention_heads"],
}
TARGETS = {"target_modules": ["query", "value"]}
# What PEFT requires for an `EncoderDecoderModel`, into which it does not look.
REFERENCE_OPTIONS = {
    **dict.fromkeys(METHODS, TARGETS),
    **dict.fromkeys(("prefix", "prompt", "p-tuning"), SIZES),
    "IA3": {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]},
}


def labelled(head: str) -> dict:
    torch.manual_seed(1)
    batch = inputs_for(head, labels=True)
    del batch["token_type_ids"]  # EncoderDecoderModel does not accept them beside prompts
    return batch


def decoder_inputs(model, labels) -> dict:
    ids = model.prepare_decoder_input_ids_from_labels(labels)
    mask = (ids != model.config.pad_token_id).long()
    mask[:, 0] = 1
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def train(model, config, batch, steps=3) -> tuple[PeftModel, list[float]]:
    """Return the adapted model and its losses. What PEFT draws is the same for each model."""
    torch.manual_seed(0)
    adapted, losses = get_peft_model(model, config).train(), []
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-2)
    for step in range(steps):
        loss = adapted(**batch).loss
        loss.backward()
        optimizer.step()
        if config.peft_type == "ADALORA":
            adapted.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        losses.append(loss.item())
    return adapted.eval(), losses


@pytest.mark.parametrize("head", [CLASSIFIER, SEQ2SEQ])
@pytest.mark.parametrize("method", METHODS)
def test_trains_as_bert_does_and_reloads(method, head, tmp_path):
    is_seq2seq = head == SEQ2SEQ
    reference = random_encoder_decoder(**NO_DROPOUT) if is_seq2seq else random_bert(head, **NO_DROPOUT)
    if (method, head) == ("prefix", CLASSIFIER) and "past_key_values" not in signature(BertModel.forward).parameters:
        pytest.skip("PEFT looks for a parameter past_key_values, which BertModel does not have since transformers 5.24")
    reference.save_pretrained(tmp_path / "bert")
    ours, again = (OURS[head].from_pretrained(tmp_path / "bert") for _ in range(2))
    batch = labelled(head)
    given = decoder_inputs(ours, batch["labels"]) if is_seq2seq else {}
    if method == "prefix":  # from labels alone, EncoderDecoderModel makes a mask that is too short for prefixes
        batch |= given
    config, task = METHODS[method], TASKS[head]
    adapted, losses = train(ours, config(task_type=task), batch)
    options = REFERENCE_OPTIONS[method] if is_seq2seq else {}
    _, expected = train(reference, config(task_type=task, **options), batch)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[2] < losses[0] - 0.02

    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    batch |= given
    del batch["labels"]  # with which AdaLoRA computes a loss that only a model in training has
    with torch.no_grad():
        assert torch.allclose(again(**batch).logits, adapted(**batch).logits, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------ default targets

TABLES = [name for name, table in vars(constants).items() if name.endswith("_MODULES_MAPPING") and "bert" in table]


def targeted(model, targets) -> set[str]:
    """The modules whose names end with a target, as PEFT compares them."""
    return {name for name, _ in model.named_modules() if name.endswith(tuple(f".{target}" for target in targets))}


@pytest.mark.parametrize("name", TABLES)
def test_default_targets_are_berts_layers(name, monkeypatch):
    """Also if PEFT is imported after the model was built, when its tables are new."""
    ours, reference = random_scratchbert("ForPreTraining"), random_bert("ForPreTraining")
    table = getattr(constants, name)
    monkeypatch.delitem(table, "scratchbert", raising=False)
    model_type = peft.LoraModel.get_model_config(ours)["model_type"]
    found, expected = targeted(ours, table[model_type]), targeted(reference, table["bert"])
    assert found == {to_scratchbert(f"{module}.weight").removesuffix(".weight") for module in expected}
    assert found
