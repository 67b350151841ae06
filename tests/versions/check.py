"""Do folders that one version of transformers 5 saves give the same bits and the same generated ids in others?

    python tests/versions/check.py VERSION…        as `make test-versions` runs it

Each version of transformers is installed in a folder of its own, over the environment that runs this, and gets a
process of its own. The version that is installed here saves the folders. Each version opens them with
`trust_remote_code=True`, compares with the `Bert…` classes of the same version, trains five steps with `Trainer` and
PEFT, runs pipelines, and saves them again, for the oldest and the newest to open. A version before 5.5 must be refused
in one line. `all` stands for the last patch of every minor version from 5.5 that pip finds.
"""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ROOT / "build" / "versions"
FIELDS = {
    "vocab_size": 120,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Auto class, class of BERT, and fields of the configuration.
HEADS = {
    "encoder": ("AutoModel", "BertModel", {}),
    "masked_lm": ("AutoModelForMaskedLM", "BertForMaskedLM", {}),
    "tokens": ("AutoModelForTokenClassification", "BertForTokenClassification", {}),
    "sequences": ("AutoModelForSequenceClassification", "BertForSequenceClassification", {}),
    "causal": ("AutoModelForCausalLM", "BertLMHeadModel", {"is_decoder": True}),
    "seq2seq": ("AutoModelForSeq2SeqLM", None, {"is_encoder_decoder": True}),
}
FORMS = ("as loaded", "float32", "bfloat16", "int8")
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sample": {"do_sample": True},
    "static": {"cache_implementation": "static"},
    "without cache": {"use_cache": False},
}
# 5.23 changed it for padded prompts, in BERT as well: these ids are compared with BERT's, not across versions.
MODES_OF_ONE_VERSION = {"repetition": {"repetition_penalty": 1.5}}


def digest(tensor) -> str:
    return hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()[:12]


def save(folder: Path) -> None:
    import torch

    import modeling_scratchbert as package

    for name, (auto_class, _, fields) in HEADS.items():
        torch.manual_seed(1)
        config = package.ScratchBertConfig(**FIELDS, **fields)
        model = package.configuration_scratchbert.AUTO_MAP[auto_class].split(".")[1]
        getattr(package, model)(config).save_pretrained(folder / name)


def inputs_of(name: str) -> dict:
    import torch

    ids = torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask.flip(1) if name == "causal" else mask}
    return inputs | ({"decoder_input_ids": ids[:, :5]} if name == "seq2seq" else {})


def outputs_of(model, name: str) -> list:
    """Hidden states or logits at tokens."""
    import torch

    inputs = inputs_of(name)
    with torch.no_grad():
        outputs = model(**inputs)
    states = outputs["last_hidden_state" if name == "encoder" else "logits"]
    is_per_token = name in ("encoder", "masked_lm", "tokens", "causal")
    return states[inputs["attention_mask"].bool()] if is_per_token else states


def generated(model, name: str, options: dict) -> list[list[int]]:
    import torch

    inputs = {key: value for key, value in inputs_of(name).items() if key != "decoder_input_ids"}
    torch.manual_seed(3)
    return model.generate(**inputs, max_new_tokens=8, **options).tolist()


def open_folders(folder: Path, again: Path | None) -> dict[str, str]:
    """Everything that must be equal in all versions; raises AssertionError where this version's BERT differs."""
    import torch
    import transformers

    results, models = {}, {}
    # All at once: the first use of the installed package registers its own classes.
    for name, form in itertools.product(HEADS, FORMS):
        load = getattr(transformers, HEADS[name][0]).from_pretrained
        models[name, form] = load(folder / name, trust_remote_code=True).eval()
        assert type(models[name, form]).__module__.startswith("transformers_modules.")
    for (name, form), model in models.items():
        if form == "as loaded":
            compare_with_bert(model, name, HEADS[name][1])
            if again is not None:
                model.save_pretrained(again / name)
        else:
            model.optimize_for_inference("int8" if form == "int8" else getattr(torch, form))
        results[f"{name}, {form}"] = digest(outputs_of(model, name))
        for mode, options in MODES.items() if name in ("causal", "seq2seq") else ():
            results[f"{name}, {form}, {mode}"] = str(generated(model, name, options))
    train(folder)
    run_pipelines(folder)
    return results


def compare_with_bert(model, name: str, bert_class: str | None) -> None:
    import torch
    import transformers

    if bert_class is None:
        return
    with TemporaryDirectory() as bert_folder:
        model.save_as_bert(bert_folder)
        bert = getattr(transformers, bert_class).from_pretrained(bert_folder).eval()
    torch.testing.assert_close(outputs_of(model, name), outputs_of(bert, name), rtol=0, atol=1e-5)
    bert.set_attn_implementation("eager")  # no other returns attention weights, in BERT
    options = {"input_ids": inputs_of(name)["input_ids"], "output_attentions": True, "output_hidden_states": True}
    recorded = [each(**options) for each in (model, bert)]
    for field in ("attentions", "hidden_states"):
        torch.testing.assert_close(recorded[0][field], recorded[1][field], rtol=0, atol=1e-5)
    for mode, options in (MODES | MODES_OF_ONE_VERSION).items() if name == "causal" else ():
        assert generated(model, name, options) == generated(bert, name, options), (name, mode)


def train(folder: Path) -> None:
    """Five steps with `Trainer`, also of an adapter of PEFT: the loss is that of a model that learns."""
    import peft
    import torch
    import transformers

    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model = load(folder / "sequences", trust_remote_code=True)
    lora = peft.LoraConfig(target_modules=["query", "value"], task_type="SEQ_CLS")
    adapted = peft.get_peft_model(load(folder / "sequences", trust_remote_code=True), lora)
    rows = [{"input_ids": torch.arange(3, 11) + n, "labels": torch.tensor(n % 2)} for n in range(20)]
    with TemporaryDirectory() as output:
        arguments = transformers.TrainingArguments(
            output, max_steps=5, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no"
        )
        for each in (model, adapted):
            before = {name: weight.clone() for name, weight in each.named_parameters() if weight.requires_grad}
            loss = transformers.Trainer(each, arguments, train_dataset=rows).train().training_loss
            assert 0 < loss < 10, loss
            assert any(not torch.equal(weight, dict(each.named_parameters())[name]) for name, weight in before.items())
        adapted.save_pretrained(output)
        again = peft.PeftModel.from_pretrained(load(folder / "sequences", trust_remote_code=True), output).eval()
    expected, found = (outputs_of(each, "sequences") for each in (adapted.eval(), again))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def run_pipelines(folder: Path) -> None:
    """The pipelines of three heads give what the `Bert…` classes give."""
    import tokenizers
    import transformers

    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2} | {f"word{n}": n for n in range(3, 120)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "attention_mask"],
    )
    tasks = {"sequences": "text-classification", "masked_lm": "fill-mask", "causal": "text-generation"}
    for name, task in tasks.items():
        auto_class, bert_class, _ = HEADS[name]
        model = getattr(transformers, auto_class).from_pretrained(folder / name, trust_remote_code=True)
        with TemporaryDirectory() as bert_folder:
            model.save_as_bert(bert_folder)
            bert = getattr(transformers, bert_class).from_pretrained(bert_folder)
        options = {"max_new_tokens": 5, "do_sample": False} if name == "causal" else {}
        texts = ["word5 [MASK] word9", "word7 word30 [MASK] word8 word4"]
        found, expected = (
            transformers.pipeline(task, model=each, tokenizer=tokenizer, device="cpu")(texts, **options)
            for each in (model, bert)
        )
        assert rounded(found) == rounded(expected), (name, found, expected)


def rounded(results):
    if isinstance(results, list):
        return [rounded(each) for each in results]
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in results.items()}


def run(version: str, *arguments: str) -> subprocess.CompletedProcess:
    """This file in a process of its own, with a version of transformers; "" for the one that is installed."""
    overlay = OVERLAYS / version
    if version and not (overlay / "complete").exists():
        import numpy

        # With what it requires: versions before 5.15 need another huggingface_hub. torch is not among it.
        packages = [f"transformers=={version}", f"numpy=={numpy.__version__}"]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade"]
        subprocess.run([*pip, "--target", overlay, *packages], check=True, capture_output=True)
        (overlay / "complete").touch()
    path = [str(overlay)] if version else []
    home = str(OVERLAYS / f"home-{version}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]), "HF_HOME": home}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, cwd=OVERLAYS, env=environment, capture_output=True, text=True)


def results_of(version: str, *arguments: str) -> dict[str, str]:
    process = run(version, *arguments)
    if process.returncode:
        return {"error": (process.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(process.stdout.splitlines()[-1])


def open_in_this_process(folder: str, again: str = "") -> None:
    import transformers

    results = {"transformers": transformers.__version__}
    results |= open_folders(Path(folder), Path(again) if again else None)
    print(json.dumps(results))


def compare(versions: list[str]) -> int:
    """Print a row for each version; return the number of those that differ."""
    failures = 0
    OVERLAYS.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        saving = run("", "save", f"{folder}/saved")
        if saving.returncode:
            sys.exit(saving.stderr)
        expected: dict[str, str] = {}
        for version in versions:
            found = results_of(version, "open", f"{folder}/saved", f"{folder}/{version}")
            failures += report(version, "saved here", found, expected)
        supported = [version for version in versions if (Path(folder) / version).exists()]
        for version in supported:
            for other in {supported[0], supported[-1]} - {version}:
                found = results_of(other, "open", f"{folder}/{version}")
                failures += report(other, f"saved by {version}", found, expected)
    return failures


def last_patches() -> list[str]:
    """The last patch of each minor version, from 5.5."""
    pip = [sys.executable, "-m", "pip", "index", "versions", "transformers", "--disable-pip-version-check"]
    output = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
    found = sorted(map(Version, re.findall(r"\b5\.\d+\.\d+\b", output.split("Available versions:")[1].splitlines()[0])))
    return [str(version) for version in {each.minor: each for each in found if each.minor >= 5}.values()]


def report(version: str, which: str, found: dict[str, str], expected: dict[str, str]) -> int:
    if tuple(map(int, version.split(".")[:2])) < (5, 5):
        is_right = "expects 5.5 or newer" in found.get("error", "")
        result = f"refused: {found.get('error', 'no')}"
    elif "error" in found or found.pop("transformers") != version:
        is_right, result = False, found.get("error", "another version was imported")
    else:
        expected.update({} if expected else found)
        different = [name for name in expected if found.get(name) != expected[name]]
        is_right, result = not different, f"{len(expected) - len(different)} of {len(expected)} equal {different or ''}"
    print(f"{version:8} {which:18} {result}", flush=True)
    return not is_right


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(Path(sys.argv[2]))
    elif sys.argv[1] == "open":
        open_in_this_process(*sys.argv[2:])
    else:
        sys.exit(
            f"{count} comparisons failed"
            if (count := compare(last_patches() if sys.argv[1:] == ["all"] else sys.argv[1:]))
            else 0
        )
