"""PEFT's LoRA on our models: what is trained, saved, opened again and merged; and prefix tuning."""

import json

import pytest
import torch

pytest.importorskip("peft", reason="PEFT is not installed")

from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file

from support.models import OURS, SPECIAL, inputs_for, random_scratchbert

pytestmark = pytest.mark.filterwarnings("ignore:Unable to fetch remote file")

CLASSIFIER = "ForSequenceClassification"
# PEFT's name for what each class does, where it has one.
TASKS = {
    "Model": "FEATURE_EXTRACTION",
    "ForMaskedLM": None,
    "ForMultipleChoice": None,
    CLASSIFIER: "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


def lora(task, **options) -> LoraConfig:
    # PEFT keeps default targets by model type, and knows ours not.
    return LoraConfig(task_type=task, r=4, target_modules=["query", "value"], **options)


@torch.no_grad()
def scores(model, head: str) -> torch.Tensor:
    torch.manual_seed(1)
    inputs = inputs_for(head)
    if head == "ForQuestionAnswering":
        del inputs["token_type_ids"]  # PeftModelForQuestionAnswering does not hand them on
    outputs = model.eval()(**inputs)
    return outputs[next(name for name in ("logits", "start_logits", "last_hidden_state") if name in outputs)]


@pytest.fixture
def base(tmp_path):
    """The folder of a checkpoint by its head."""

    def save(head: str):
        fields = SPECIAL if head == "ForConditionalGeneration" else {}
        fields |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        random_scratchbert(head, **fields).save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return save


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", TASKS)
def test_adapters_are_saved_opened_and_merged(head, base, tmp_path):
    folder, own = base(head), OURS[head]
    before = scores(own.from_pretrained(folder), head)
    adapted = get_peft_model(own.from_pretrained(folder), lora(TASKS[head], init_lora_weights=False))
    expected = scores(adapted, head)
    assert (expected - before).abs().max() > 0.1
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(own.from_pretrained(folder), tmp_path / "adapter")
    assert_same(scores(again, head), expected)
    merged = again.merge_and_unload()
    assert type(merged) is own
    assert_same(scores(merged, head), expected)
    merged.save_pretrained(tmp_path / "merged")
    assert_same(scores(own.from_pretrained(tmp_path / "merged"), head), expected)


@pytest.fixture
def trained(base, tmp_path):
    """A classifier of which the adapters and the head were trained; its folder, the adapter's, the losses, and the
    weights before."""
    folder = base(CLASSIFIER)
    model = get_peft_model(OURS[CLASSIFIER].from_pretrained(folder), lora("SEQ_CLS", modules_to_save=["classifier"]))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    batch, losses = inputs_for(CLASSIFIER, labels=True), []
    model.train()
    for _ in range(8):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(tmp_path / "adapter")
    return model, folder, tmp_path / "adapter", losses, before


def test_training_changes_adapters_and_head_alone(trained):
    model, _, adapter, losses, before = trained
    assert losses[-1] < losses[0] - 0.1
    changed = {name for name, parameter in model.named_parameters() if not parameter.equal(before[name])}
    adapters = [
        f"model.encoder.blocks.{block}.attention.{matrix}.lora_{half}.default.weight"
        for block in range(2)
        for matrix in ("query", "value")
        for half in "AB"
    ]
    head = [f"classifier.modules_to_save.default.{name}" for name in ("weight", "bias")]
    assert changed == {f"base_model.model.{name}" for name in adapters + head}
    assert len(load_file(adapter / "adapter_model.safetensors")) == len(changed)


def test_a_trained_adapter_and_its_head_open_in_every_way(trained):
    model, folder, adapter, _, _ = trained
    expected = scores(model, CLASSIFIER)
    own = OURS[CLASSIFIER]
    fresh = own.from_pretrained(folder)
    with torch.no_grad():
        fresh.classifier.weight.zero_()  # the adapter brings the head that it was trained with
    assert_same(scores(PeftModel.from_pretrained(fresh, adapter), CLASSIFIER), expected)
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    by_peft = AutoPeftModelForSequenceClassification.from_pretrained(str(adapter), trust_remote_code=True)
    assert type(by_peft.base_model.model).__name__ == own.__name__
    assert_same(scores(by_peft, CLASSIFIER), expected)
    # transformers' own ways
    assert_same(scores(own.from_pretrained(adapter), CLASSIFIER), expected)
    loaded = own.from_pretrained(folder)
    loaded.load_adapter(str(adapter))
    assert_same(scores(loaded, CLASSIFIER), expected)


def test_a_merged_model_is_packed_for_inference(trained):
    model, *_ = trained
    expected = scores(model, CLASSIFIER)
    assert_same(scores(model.merge_and_unload().optimize_for_inference(), CLASSIFIER), expected)


def test_prefix_tuning_of_a_seq2seq_model_with_labels_alone():
    """The decoder's input and its mask are derived from the labels; the prefixes are cached positions before them."""
    fields = {**SPECIAL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = random_scratchbert("ForConditionalGeneration", **fields)
    config = model.config
    prefix = PrefixTuningConfig(
        task_type="SEQ_2_SEQ_LM",
        num_virtual_tokens=5,
        token_dim=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
    )
    tuned = get_peft_model(model, prefix)
    batch = inputs_for("ForConditionalGeneration", labels=True)
    del batch["token_type_ids"]
    outputs = tuned(**batch)
    assert outputs.logits.shape[:2] == batch["labels"].shape
    ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    mask = (ids != config.pad_token_id).long()
    mask[:, 0] = 1
    given = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    assert_same(outputs.logits, tuned(**batch, **given).logits)
    outputs.loss.backward()
    assert all(parameter.grad is not None for parameter in tuned.parameters() if parameter.requires_grad)
