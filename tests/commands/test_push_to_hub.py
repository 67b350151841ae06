"""Models go to a Hub and come back from it: a server on this machine that huggingface_hub talks to as to the real one.

One process, in which the package cannot be imported and whose cache is empty, opens all that was pushed; the tests read
what came of it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from huggingface_hub import constants

import modeling_scratchbert
import push_to_hub
from modeling_scratchbert.configuration_scratchbert import AUTO_MAP
from support.folders import SCRIPTS
from support.golden import assert_golden
from support.hub_server import serving, use
from support.models import OURS, inputs_for, random_scratchbert
from toolkit import publish

TOKEN = "hf_" + "Ada" * 12  # may write to ada's and to the team's repositories
READER = "hf_" + "Bob" * 12
WRONG = "hf_" + "Eve" * 12
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "."]
OPENS = {path.split(".ScratchBert")[1]: auto for auto, path in reversed(AUTO_MAP.items())} | {
    "Seq2SeqModel": "AutoModel"
}


def saved(folder: Path, head: str = "ForSequenceClassification", **fields):
    """A model with a tokenizer, in `folder`."""
    model = random_scratchbert(head, **fields)
    model.save_pretrained(folder)
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return model


def tensors(model, inputs) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {name: value for name, value in model.eval()(**inputs).items() if torch.is_tensor(value)}


# ------------------------------------------------------------------------------------- opened by somebody else

VISITOR = """
import json, sys
from sentence_similarity import PACKAGE, block_package
block_package()
import torch, transformers
torch.set_num_threads(1)
wanted, inputs = torch.load("wanted.pt"), torch.load("inputs.pt")
found = {}
for name, (auto, head, options) in wanted.items():
    try:
        model, info = getattr(transformers, auto).from_pretrained(
            name.split("@")[0], trust_remote_code=True, output_loading_info=True, **options
        )
        with torch.no_grad():
            outputs = {k: v for k, v in model.eval()(**inputs[head]).items() if torch.is_tensor(v)}
        ids = transformers.AutoTokenizer.from_pretrained(name.split("@")[0], **options)("The cat sat.")["input_ids"]
        found[name] = {
            "module": type(model).__module__, "class": type(model).__name__, "outputs": outputs, "ids": ids,
            "incomplete": sorted(info["missing_keys"] | info["unexpected_keys"]),
        }
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
assert sys.modules[PACKAGE] is None
torch.save(found, "found.pt")
"""


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """What was pushed, of every kind, and what a stranger's new process found."""
    root = tmp_path_factory.mktemp("visit")
    inputs, expected, wanted = {}, {}, {}
    with serving(**{TOKEN: {"ada", "team"}, READER: {"bob"}}) as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, patch, root / "own cache", TOKEN)
        torch.manual_seed(0)
        for head in OURS:
            model = saved(root / head, head)
            inputs[head] = inputs_for(head)
            expected[f"ada/{head}"] = tensors(model, inputs[head])
            wanted[f"ada/{head}"] = OPENS[head], head, {}
            assert push_to_hub.main([str(root / head), f"ada/{head}"]) == 0

        auto = "AutoModel", "Model"
        first = hub.repositories["ada/Model"].refs["main"]
        assert push_to_hub.main([str(root / "Model"), "ada/Model", "--revision", "as-it-was"]) == 0
        code = root / "Model" / "feed_forward.py"
        text = code.read_text()
        code.write_text(text.replace("self.output(self.activation(", "2 * self.output(self.activation("))
        assert code.read_text() != text
        assert push_to_hub.main([str(root / "Model"), "ada/Model"]) == 0
        wanted["ada/Model@commit"] = *auto, {"revision": first}
        wanted["ada/Model@branch"] = *auto, {"revision": "as-it-was"}

        assert push_to_hub.main([str(root / "ForMaskedLM"), "ada/secret", "--private"]) == 0
        wanted["ada/secret"] = "AutoModelForMaskedLM", "ForMaskedLM", {}
        wanted["ada/secret@token"] = "AutoModelForMaskedLM", "ForMaskedLM", {"token": TOKEN}

        model = OURS["ForMaskedLM"].from_pretrained(root / "ForMaskedLM")
        model.push_to_hub("ada/direct")
        transformers.AutoTokenizer.from_pretrained(root / "ForMaskedLM").push_to_hub("ada/direct")
        wanted["ada/direct"] = "AutoModelForMaskedLM", "ForMaskedLM", {}
        model.config.push_to_hub("ada/config")

        torch.save(wanted, root / "wanted.pt")
        torch.save(inputs, root / "inputs.pt")
        before = len(hub.requests)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(root / "empty"),
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(SCRIPTS),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("HF_TOKEN", None)
        run = subprocess.run(
            [sys.executable, "-c", VISITOR], cwd=root, env=environment, capture_output=True, text=True, timeout=600
        )
        assert run.returncode == 0, run.stderr[-4000:]
        yield SimpleNamespace(
            hub=hub, root=root, expected=expected, found=torch.load(root / "found.pt"), requests=hub.requests[before:]
        )


def assert_found(visit, name: str, expected: dict) -> None:
    found = visit.found[name]
    assert isinstance(found, dict), found
    assert found["incomplete"] == []
    assert found["ids"] == [2, 5, 6, 7, 10, 3]
    assert found["module"].startswith("transformers_modules.ada.")
    assert found["outputs"].keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found["outputs"][key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("head", [head for head in OURS if head != "Model"])
def test_a_stranger_opens_what_was_pushed(visit, head):
    assert_found(visit, f"ada/{head}", visit.expected[f"ada/{head}"])
    assert visit.found[f"ada/{head}"]["class"] == f"ScratchBert{head}"


@pytest.mark.parametrize("revision", ["commit", "branch"])
def test_an_earlier_revision_is_what_it_was(visit, revision):
    assert_found(visit, f"ada/Model@{revision}", visit.expected["ada/Model"])


def test_a_second_push_with_other_code_is_what_runs(visit):
    now, before = (visit.found[name]["outputs"]["last_hidden_state"] for name in ("ada/Model", "ada/Model@commit"))
    assert (now - before).abs().max() > 1e-2
    changed = visit.hub.files("ada/Model")["feed_forward.py"]
    assert b"2 * self.output" in changed
    assert b"2 * self.output" not in visit.hub.files("ada/Model", "as-it-was")["feed_forward.py"]


def test_a_private_repository_wants_a_token(visit):
    assert "ada/secret is not a local folder and is not a valid model" in visit.found["ada/secret"]
    assert_found(visit, "ada/secret@token", visit.expected["ada/ForMaskedLM"])


def test_models_tokenizers_and_configurations_push_themselves(visit):
    assert_found(visit, "ada/direct", visit.expected["ada/ForMaskedLM"])
    code = {path.name for path in Path(modeling_scratchbert.__file__).parent.glob("*.py")} - {"__init__.py"}
    assert code | {"config.json", "README.md"} <= set(visit.hub.files("ada/config"))
    assert json.loads(visit.hub.files("ada/config")["config.json"])["auto_map"] == AUTO_MAP


def test_weights_come_from_elsewhere_without_the_token(visit):
    fetched = [with_token for method, path, with_token in visit.requests if path.startswith("/storage/")]
    assert len(fetched) >= len(OURS)
    assert not any(fetched)


def test_what_was_pushed(visit):
    files = visit.hub.files("ada/ForTokenClassification")
    folder = visit.root / "ForTokenClassification"
    assert set(files) == {path.name for path in folder.iterdir()} | {".gitattributes", "README.md"}
    assert all(files[path.name] == path.read_bytes() for path in folder.iterdir())


# ------------------------------------------------------------------------------------- pushing


@pytest.fixture
def hub(tmp_path, monkeypatch, quiet_only_here):
    with serving(**{TOKEN: {"ada", "team"}, READER: {"bob"}}) as hub:
        use(hub, monkeypatch, tmp_path / "cache", TOKEN)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield hub


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "my-model"
    saved(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "my-model"))


@pytest.fixture
def push(folder, capsys):
    """Runs the script; returns its exit code, and what it said, which never has a token in it."""

    def run(repo="ada/m", *flags):
        capsys.readouterr()
        code = push_to_hub.main([str(folder), repo, *flags])
        said = capsys.readouterr()
        assert not any(token in said.out + said.err for token in (TOKEN, READER, WRONG))
        return code, said.out, said.err

    return run


def assert_one_line(result, *parts) -> None:
    code, _, err = result
    assert code == 2
    assert err.startswith("push_to_hub.py: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


CLUTTER = {
    "checkpoints/step-00000001/model.safetensors": "checkpoints of the training",
    "checkpoint-500/config.json": "checkpoints of the training",
    "logs/events.out.tfevents.1": "logs of the training",
    "predictions_test.jsonl": "predictions, which have the rows of the data",
    "predictions_validation.json": "predictions, which have the rows of the data",
    "optimizer.pt": "the training's state",
    "training_args.bin": "the training's state",
    ".env": "hidden",
    ".git/config": "hidden",
    "hf_token.txt": "looks like a secret",
    "deploy.pem": "looks like a secret",
}


def test_a_dry_run_lists_and_asks_nobody(hub, folder, push, monkeypatch):
    for name in CLUTTER:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "notes.txt").write_text(f"first\nmy token is {TOKEN}\n")
    (folder / "script.sh").write_text("curl https://ada:pa55@example.org/")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    code, out, err = push("ada/m", "--dry-run")
    assert (code, err) == (0, "")
    assert hub.requests == []
    goes_up, _, stays = out.partition("bytes in")
    listed = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in goes_up.splitlines()[:-1]}
    own = {name for name in os.listdir(folder) if (folder / name).is_file()}
    clutter = {*CLUTTER, "notes.txt", "script.sh"}
    assert set(listed) == (own - clutter) | {"1_Pooling/config.json", "README.md"}
    assert listed["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    for name, why in CLUTTER.items():
        assert any(name in line and why in line for line in stays.splitlines()), name
    assert "left behind: notes.txt: it looks like a secret, in line 2" in stays
    assert "left behind: script.sh: it looks like a secret, in line 1" in stays
    monkeypatch.delenv("HF_TOKEN")
    assert push("ada/m", "--dry-run")[0] == 0

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert push()[0] == 0
    assert set(hub.files("ada/m")) == set(listed) | {".gitattributes"}


@pytest.mark.parametrize("name", ["README.md", "config.json", "attention.py"])
@pytest.mark.parametrize("secret", [WRONG, "ghp_" + "a1B2" * 9, "-----BEGIN RSA PRIVATE KEY-----"])
def test_a_secret_in_a_file_that_is_needed_is_refused(hub, folder, push, name, secret):
    if name == "config.json":
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**fields, "_name_or_path": secret}, indent=2))
    else:
        with (folder / name).open("a") as file:
            file.write(f"# {secret}\n")
    assert_one_line(push(), name, "looks like a secret", ", line ")
    assert hub.requests == []


@pytest.mark.parametrize("token", [TOKEN, "ada-s word"])
def test_the_token_is_nowhere(hub, folder, push, monkeypatch, token):
    """Neither in what was sent, nor in what was written here; whatever a token looks like."""
    hub.users[token] = {"ada"}
    monkeypatch.setenv("HF_TOKEN", token)
    (folder / "run.log").write_text(f"token: {token}")
    assert push("ada/m", "--private", "--revision", "v1")[0] == 0
    contents = [*hub.large_files.values()]
    for repository in hub.repositories.values():
        contents += [blob.content for commit in repository.commits.values() for blob in commit.files.values()]
        assert not any(token in commit.title for commit in repository.commits.values())
    assert len(contents) > 20
    written = [path for path in folder.parent.rglob("*") if path.is_file() and path.name != "run.log"]
    assert not any(token.encode() in content for content in [*contents, *(path.read_bytes() for path in written)])


def test_a_server_that_repeats_the_token_is_not_quoted(hub, push, monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError(f"LFS batch API returned errors:\nno such token as {TOKEN}")

    monkeypatch.setattr(publish.HfApi, "create_commit", refuse)
    assert_one_line(push(), "no such token as …")


# --- what breaks


@pytest.mark.parametrize("where", ["/commit/", "/storage/", "/preupload/", "/objects/batch", "/objects/verify"])
def test_a_push_that_breaks_off_leaves_all_as_it_was(hub, folder, push, where):
    assert push()[0] == 0
    before, commits = hub.files("ada/m"), len(hub.repositories["ada/m"].commits)
    saved(folder, seed=1)
    (folder / "attention.py").write_text("# changed\n")
    hub.breaks = lambda method, path: where in path
    assert_one_line(push(), "cannot be reached, or closed the connection", "run it again")
    assert hub.files("ada/m") == before
    assert len(hub.repositories["ada/m"].commits) == commits

    hub.breaks = lambda method, path: False
    sent = len(hub.requests)
    assert push()[0] == 0
    after = hub.files("ada/m")
    assert after["attention.py"] == b"# changed\n"
    assert after["model.safetensors"] == (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
    # What has arrived once is not sent again.
    uploads = [path for method, path, _ in hub.requests[sent:] if method == "PUT"]
    assert len(uploads) == (0 if where in ("/commit/", "/objects/verify") else 1)


def test_an_answer_that_is_lost_does_no_harm(hub, push):
    """The commit has been made and the client does not hear of it."""
    answer = publish.HfApi.create_commit

    def lose(*args, **kwargs):
        answer(*args, **kwargs)
        raise publish.HTTPError("Server disconnected without sending a response.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish.HfApi, "create_commit", lose)
        assert_one_line(push(), "run it again")
    commits = len(hub.repositories["ada/m"].commits)
    assert push()[1].endswith("ada/m has all files already\n")
    assert len(hub.repositories["ada/m"].commits) == commits


def test_a_push_that_came_between_is_not_overwritten(hub, folder, push):
    assert push()[0] == 0
    repository = hub.repositories["ada/m"]

    def somebody_else(method, path):
        if path.endswith("/preupload/main"):
            head = repository.commits[repository.refs["main"]]
            repository.add("main", type(head)(head.files, "between", head.sha))
        return False

    (folder / "attention.py").write_text("# changed\n")
    hub.breaks = somebody_else
    assert_one_line(push(), "somebody else has pushed to ada/m")
    assert hub.files("ada/m")["attention.py"] != b"# changed\n"


@pytest.mark.parametrize(
    ("token", "repo", "parts"),
    [
        (WRONG, "ada/m", ["does not accept the token (401)", "/settings/tokens", "HF_TOKEN"]),
        (WRONG, "ada/there", ["does not accept the token (401)"]),
        (READER, "ada/m", ["no write access to ada/m (403)", "--pull_request"]),
        (READER, "ada/there", ["no write access to ada/there (403)"]),
        (None, "ada/m", ["There is no token", "hf auth login", "HF_TOKEN"]),
    ],
)
def test_a_token_that_will_not_do(hub, push, monkeypatch, token, repo, parts):
    assert push("ada/there")[0] == 0
    before = hub.files("ada/there")
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    assert_one_line(push(repo), *parts)
    assert set(hub.repositories) == {"ada/there"}
    assert hub.files("ada/there") == before


def test_no_network(hub, push, monkeypatch):
    with serving() as gone:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", gone.endpoint)
    assert_one_line(push(), f"the Hub at {gone.endpoint} cannot be reached", "check the network", "HF_ENDPOINT")


def test_offline(hub, push, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_one_line(push(), "HF_HUB_OFFLINE is set")
    assert hub.requests == []


def test_a_repository_that_is_public_is_not_taken_for_private(hub, push):
    assert push()[0] == 0
    commits = len(hub.repositories["ada/m"].commits)
    assert_one_line(push("ada/m", "--private"), "ada/m is public already", "/ada/m/settings")
    assert push("ada/p", "--private")[0] == 0
    assert hub.repositories["ada/p"].private
    assert_one_line(push("ada/p", "--public"), "ada/p is private already")
    assert push("ada/p", "--message", "again")[0] == 0
    assert len(hub.repositories["ada/m"].commits) == commits


def test_bad_usage(hub, folder, push):
    assert_one_line(push("m"), "REPO is 'm'", "user/m")
    assert_one_line(push("ada/m/x"), "ada/m/x")
    assert_one_line(push("ada/m", "--parity", str(folder / "config.json")), "check_parity.py --json")
    assert_one_line(push("ada/m", "--revision", "refs/pr/7"), "its revision does not exist", "404")
    (folder / "attention.py").rename(folder / "modeling.py")
    (folder / "modeling_scratchbert.py").unlink()
    assert_one_line(push(), "no modeling_scratchbert.py", "auto_map")
    (folder / "model.safetensors").unlink()
    assert_one_line(push(), "no weights")
    (folder / "config.json").unlink()
    assert_one_line(push(), "no config.json")
    shutil.rmtree(folder)
    assert_one_line(push(), "is not a folder")


# --- where it goes


def test_a_branch_and_a_pull_request(hub, folder, push, monkeypatch):
    assert push("team/m")[0] == 0
    first = hub.files("team/m")
    (folder / "attention.py").write_text("# v2\n")
    assert push("team/m", "--revision", "v2", "--message", "Better")[0] == 0
    repository = hub.repositories["team/m"]
    assert hub.files("team/m") == first
    assert hub.files("team/m", "v2")["attention.py"] == b"# v2\n"
    assert repository.find("v2").title == "Better"

    monkeypatch.setenv("HF_TOKEN", READER)  # who may not write there
    code, out, _ = push("team/m", "--pull-request")
    assert code == 0
    assert out.endswith(f"pushed to {hub.endpoint}/team/m/discussions/1\n")
    assert hub.files("team/m") == first
    assert hub.files("team/m", "refs/pr/1")["attention.py"] == b"# v2\n"


def test_weights_that_were_replaced_are_gone(hub, folder, push):
    """A single file that is left beside new shards would be what is opened."""
    assert push()[0] == 0
    random_scratchbert("ForSequenceClassification", seed=1).save_pretrained(folder, max_shard_size="20KB")
    assert not (folder / "model.safetensors").exists()
    (folder / "probe.json").unlink()
    assert push()[0] == 0
    assert set(hub.files("ada/m")) == {*os.listdir(folder), ".gitattributes", "README.md"}


def test_nothing_new_is_no_commit(hub, push):
    code, out, _ = push()
    assert code == 0
    assert out.splitlines()[-1].startswith(f"pushed to {hub.endpoint}/ada/m/commit/")
    commits = len(hub.repositories["ada/m"].commits)
    code, out, _ = push()
    assert (code, out.splitlines()[-1]) == (0, "ada/m has all files already")
    assert len(hub.repositories["ada/m"].commits) == commits


# --- the card


def test_a_card_is_made_where_there_is_none(hub, tmp_path, folder, push):
    """With the metrics, and the table of --parity without its folders and its gradients."""
    (folder / "metrics.json").write_text(json.dumps({"validation": {"accuracy": 0.9375}, "history": []}))
    row = {
        "what": "hidden state 2",
        "kind": "hidden state",
        "shape": [3, 7, 32],
        "max_abs": 2.5e-7,
        "own_error": 3e-7,
        "equal": True,
    }
    report = {
        "model": f"ScratchBertModel from {tmp_path}/my-model",
        "reference": "BertModel from google/bert exported to BERT",
        "batch": "3 sentences",
        "not_compared": ["pooler, only in google/bert"],
        "rows": [row, {**row, "kind": "gradient", "what": "gradient: x"}, {**row, "equal": False}],
        "verdict": "DIFFERENT: hidden state 2",
    }
    (tmp_path / "parity.json").write_text(json.dumps(report))
    assert push("ada/m", "--parity", str(tmp_path / "parity.json"))[0] == 0
    assert_golden(hub.files("ada/m")["README.md"].decode(), Path(__file__).with_name("golden") / "published.md")
    assert not (folder / "README.md").exists()


def test_the_folder_s_card_is_kept(hub, folder, push):
    card = (
        "---\nlanguage: no\npipeline_tag: zero-shot-classification\nversion: '1.10'\n---\n\n# my-model\n\n"
        "## Results\n\nGood.\n\n"
        'model = AutoModel.from_pretrained("my-model", trust_remote_code=True)\n'
        'other = AutoModel.from_pretrained("bert-base-uncased")\n'
    )
    (folder / "README.md").write_text(card)
    (folder / "metrics.json").write_text(json.dumps({"validation": {"accuracy": 0.9375}}))
    assert push()[0] == 0
    expected = card.replace('("my-model"', '("ada/m"').replace("language: no", "language: 'no'")
    expected = expected.replace("'1.10'\n", "'1.10'\ntags:\n- scratchbert\nlibrary_name: transformers\n")
    assert hub.files("ada/m")["README.md"].decode() == expected
    assert (folder / "README.md").read_text() == card

    for metadata in ("tags: [a", "model-index: broken"):
        (folder / "README.md").write_text(f"---\n{metadata}\n---\n")
        assert_one_line(push(), "README.md has metadata that cannot be read")


def test_a_pushed_recipe_has_no_absolute_path(tmp_path):
    folder = tmp_path / "run"
    random_scratchbert("Model").save_pretrained(folder)
    kept = {"seed": 3, "tokenizer_name": "google/bert"}
    paths = {"model": tmp_path / "bert", "train_file": [tmp_path / "a.csv", "b.csv"], "output_dir": folder}
    (folder / "recipe.yaml").write_text(json.dumps(paths | kept, default=str))
    listing = publish.survey(folder, "ada/m")
    expected = {"model": "bert", "train_file": ["a.csv", "b.csv"], "output_dir": "run"}
    assert yaml.safe_load(listing.files["recipe.yaml"]) == expected | kept
    for content in listing.files.values():
        text = content if isinstance(content, bytes) else content.read_bytes()
        assert str(tmp_path).encode() not in text
