"""Models are pushed to a Hub, a server on this machine, and opened from it in a process that has no package."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi

import modeling_scratchbert
from modeling_scratchbert import AUTO_MAP
from support.folders import CODE
from support.hub_server import TOKEN, serving, use
from support.models import OURS, inputs_for, random_scratchbert, word_tokenizer

AUTO_CLASSES = {path.split(".ScratchBert")[1]: auto for auto, path in reversed(AUTO_MAP.items())}
AUTO_CLASSES["Seq2SeqModel"] = "AutoModel"

VISITOR = """
import sys
sys.modules["modeling_scratchbert"] = None
import torch, transformers
torch.set_num_threads(1)
found = {}
for name, (auto, inputs, options) in torch.load("wanted.pt").items():
    try:
        options = {"trust_remote_code": True, **options}
        model = getattr(transformers, auto).from_pretrained(name.split("@")[0], **options).eval()
        ids = transformers.AutoTokenizer.from_pretrained(name.split("@")[0], **options)("The cat sat.")["input_ids"]
        with torch.no_grad():
            outputs = {key: value for key, value in model(**inputs).items() if torch.is_tensor(value)}
        found[name] = type(model).__name__, type(model).__module__, ids, outputs
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
torch.save(found, "found.pt")
"""


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """Models of every class, their outputs, and what a new process with an empty cache opened."""
    root = tmp_path_factory.mktemp("visit")
    tokenizer = word_tokenizer(["the", "cat", "sat", "on", "mat", "."])
    expected, wanted = {}, {}
    with serving(**{TOKEN: {"ada"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, root / "own cache", TOKEN)
        for head in OURS:
            model, inputs = random_scratchbert(head), inputs_for(head)
            with torch.no_grad():
                outputs = model(**inputs)
            expected[head] = {key: value for key, value in outputs.items() if torch.is_tensor(value)}
            model.push_to_hub(f"ada/{head}", private=head == "ForMaskedLM")
            tokenizer.push_to_hub(f"ada/{head}")
            wanted[f"ada/{head}"] = AUTO_CLASSES[head], inputs, {"token": TOKEN}
        auto, inputs, _ = wanted["ada/ForMaskedLM"]
        wanted["ada/ForMaskedLM@no-token"] = auto, inputs, {}
        first = hub.repositories["ada/Model"].refs["main"]
        wanted["ada/Model@commit"] = *wanted["ada/Model"][:2], {"revision": first}
        code = Path(modeling_scratchbert.__file__).with_name("feed_forward.py").read_text(encoding="utf-8")
        changed = code.replace("self.output(self.activation(", "2 * self.output(self.activation(")
        upload = {"path_in_repo": "feed_forward.py", "repo_id": "ada/Model"}
        HfApi().upload_file(path_or_fileobj=changed.encode(), **upload)
        model.config.push_to_hub("ada/config")

        torch.save(wanted, root / "wanted.pt")
        before = len(hub.requests)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(root / "empty"),
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
        }
        subprocess.run([sys.executable, "-c", VISITOR], cwd=root, env=environment, check=True)
        requests = hub.requests[before:]
        yield SimpleNamespace(hub=hub, expected=expected, found=torch.load(root / "found.pt"), requests=requests)


@pytest.mark.parametrize("name", [*(head for head in OURS if head != "Model"), "Model@commit"])
def test_a_pushed_model_opens_without_the_package(visit, name):
    head = name.partition("@")[0]
    class_name, module, ids, outputs = visit.found[f"ada/{name}"]
    assert class_name == f"ScratchBert{head}"
    assert module.startswith("transformers_modules.ada.")
    assert ids == [2, 5, 6, 7, 10, 3]
    torch.testing.assert_close(outputs, visit.expected[head], rtol=0, atol=1e-6)


def test_code_of_a_later_commit_runs(visit):
    *_, outputs = visit.found["ada/Model"]
    assert (outputs["last_hidden_state"] - visit.expected["Model"]["last_hidden_state"]).abs().max() > 1e-2


def test_a_private_model_requires_the_token(visit):
    assert isinstance(visit.found["ada/ForMaskedLM@no-token"], str)
    fetched = [with_token for _, path, with_token in visit.requests if path.startswith("/storage/")]
    assert len(fetched) >= len(OURS)
    assert not any(fetched)  # large files come from another host, which gets no token


def test_a_pushed_configuration_has_the_code(visit):
    files = visit.hub.files("ada/config")
    assert CODE | {"config.json"} <= set(files)
    assert json.loads(files["config.json"])["auto_map"] == AUTO_MAP
