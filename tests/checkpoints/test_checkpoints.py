"""Reading which tensors a checkpoint holds, whatever state its files are in, and writing a folder all or nothing."""

import json
import os
import pickle
import shutil

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from modeling_scratchbert.bert.files import tensor_names
from modeling_scratchbert.checkpoints import staged
from support.checkpoint_kinds import CONTAINERS, Intruder, weight_files, write_hub_cache, write_weights
from support.refusals import assert_mentions, refusal

TENSORS = {f"block.{i}.weight": torch.arange(4000.0).view(50, 80) + i for i in range(6)}


# --- tensor_names


def assert_unreadable(folder, *parts):
    """`tensor_names` raises OSError, and the message has all of `parts`."""
    assert_mentions(refusal(tensor_names, folder, error=OSError), *parts)


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_the_names_in_every_container(tmp_path, container, variant):
    write_weights(tmp_path, TENSORS, container, variant)
    assert tensor_names(tmp_path, variant) == set(TENSORS)
    assert tensor_names(str(tmp_path), variant) == set(TENSORS)
    is_safetensors = "safetensors" in container
    assert tensor_names(tmp_path, variant, use_safetensors=is_safetensors) == set(TENSORS)
    # What it does not have is not its business: `from_pretrained` says what is missing.
    assert not tensor_names(tmp_path, variant, use_safetensors=not is_safetensors)
    assert not tensor_names(tmp_path, "other")


def test_no_weights_no_names(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert not tensor_names(tmp_path)


def test_the_names_in_a_subfolder_and_in_the_cache_of_the_hub(tmp_path):
    write_weights(tmp_path / "repo", {"outer": torch.zeros(1)})
    write_weights(tmp_path / "repo" / "inner", TENSORS, "sharded safetensors")
    assert tensor_names(tmp_path / "repo", subfolder="inner") == set(TENSORS)
    write_hub_cache(tmp_path, "someone/something", tmp_path / "repo")
    hub = {"cache_dir": tmp_path, "local_files_only": True}
    assert tensor_names("someone/something", **hub) == {"outer"}
    assert tensor_names("someone/something", subfolder="inner", **hub) == set(TENSORS)


def test_of_several_files_it_reads_the_one_that_from_pretrained_does(tmp_path):
    """safetensors before torch, one file before shards."""
    for container in ("sharded bin", "bin", "sharded safetensors", "safetensors"):
        write_weights(tmp_path, {f"{container}.{i}": torch.zeros(1) for i in range(3)}, container)
        assert tensor_names(tmp_path) == {f"{container}.{i}" for i in range(3)}
    assert tensor_names(tmp_path, use_safetensors=False) == {f"bin.{i}" for i in range(3)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder and, in it, a file of weights of each kind."""
    folders = {}
    for container in CONTAINERS:
        folders[container] = tmp_path_factory.mktemp(container.replace(" ", "_"))
        write_weights(folders[container], TENSORS, container)
    return folders


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.sampled_from(CONTAINERS), st.floats(0, 1, exclude_max=True))
@example("safetensors", 0.0)
@example("safetensors", 0.003)  # within the header
@example("bin", 0.0)
@example("bin", 0.5)
@example("legacy bin", 0.0)
@example("legacy bin", 0.99)
@example("sharded bin", 0.6)
def test_a_file_that_ends_too_soon_is_named(whole, tmp_path_factory, container, share):
    folder = tmp_path_factory.mktemp("cut")
    shutil.copytree(whole[container], folder, dirs_exist_ok=True)
    file = weight_files(folder)[-1]
    content = file.read_bytes()
    size = int(share * len(content))
    file.write_bytes(content[:size])
    assert_unreadable(folder, file, f"({size:,} bytes)", "truncated")


GARBAGE = {
    "noise": b"\x93garbage\x00" * 500,
    "a pointer of git lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n",
    "a zero byte": b"\0",
    "a web page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 20,
    "a pickle that is no checkpoint": pickle.dumps({"lr": 0.1}, protocol=2),
}


@pytest.mark.parametrize("content", GARBAGE)
@pytest.mark.parametrize("container", ["safetensors", "sharded safetensors", "bin", "sharded bin"])
def test_a_file_of_another_kind_is_named(tmp_path, container, content):
    write_weights(tmp_path, TENSORS, container)
    file = weight_files(tmp_path)[0]
    file.write_bytes(GARBAGE[content])
    assert_unreadable(tmp_path, file, "corrupt or not a file of weights")


@pytest.mark.parametrize(
    "content", [[torch.zeros(2), torch.ones(2)], torch.zeros(3), 7, "text", {1: torch.zeros(2)}, None], ids=repr
)
def test_a_pickle_without_named_tensors_is_no_file_of_weights(tmp_path, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert_unreadable(tmp_path, tmp_path / "pytorch_model.bin", "not a file of weights")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_never_run(tmp_path, zipped):
    intruder = {**TENSORS, "intruder": Intruder(tmp_path / "ran")}
    torch.save(intruder, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert_unreadable(tmp_path, tmp_path / "pytorch_model.bin", "not a file of weights")
    assert not (tmp_path / "ran").exists()
    # That is not because the trap would not work
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("container", ["sharded safetensors", "sharded bin"])
@pytest.mark.parametrize(
    "content",
    [
        *("", "{", '{"weight_map": ', "\x00\x01", "[]", "{}", '{"metadata": {}}', '{"weight_map": null}'),
        *('{"metadata": {}, "weight_map": []}', '{"metadata": {}, "weight_map": null}'),
    ],
    ids=repr,
)
def test_an_index_that_is_none_is_named(tmp_path, container, content):
    write_weights(tmp_path, TENSORS, container)
    index = next(tmp_path.glob("*.index.json"))
    index.write_text(content)
    assert_unreadable(tmp_path, index)


@pytest.mark.parametrize("container", ["sharded safetensors", "sharded bin"])
def test_a_shard_that_is_not_there_is_named(tmp_path, container):
    write_weights(tmp_path, TENSORS, container)
    shard = weight_files(tmp_path)[1]
    shard.unlink()
    assert_unreadable(tmp_path, shard.name, tmp_path)


# --- staged


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_files_come_all_at_once_and_the_rest_stays(tmp_path):
    (tmp_path / "tokenizer.json").write_text("tokens")
    (tmp_path / "config.json").write_text("old")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "model.safetensors").write_text("another model's")
    with staged(tmp_path) as folder:
        (folder / "config.json").write_text("new")
        (folder / "model.safetensors").write_text("weights")
        assert (tmp_path / "config.json").read_text() == "old"
        assert not (tmp_path / "model.safetensors").exists()
    assert contents(tmp_path) == {
        "tokenizer.json": "tokens",
        "config.json": "new",
        "model.safetensors": "weights",
        os.path.join("runs", "model.safetensors"): "another model's",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "runs",
        "tokenizer.json",
    ]


def save_and_fail(target, error):
    with staged(target) as folder:
        (folder / "config.json").write_text("new")
        (folder / "model.safetensors").write_text("half of th")
        raise error


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), RuntimeError()])
def test_a_failure_leaves_everything_as_it_was(tmp_path, error):
    before = {"config.json": "old", "model-00001-of-00002.safetensors": "1", "model-00002-of-00002.safetensors": "2"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(type(error)):
        save_and_fail(tmp_path, error)
    assert contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == len(before)


def test_a_folder_is_made_with_its_parents(tmp_path):
    with staged(str(tmp_path / "a" / "b")) as folder:
        (folder / "config.json").write_text("{}")
    assert contents(tmp_path) == {os.path.join("a", "b", "config.json"): "{}"}


def names_of_weights(variant, shards):
    """The files that transformers writes for that many shards."""
    stem = f"model.{variant}" if variant else "model"
    if shards == 1:
        return {f"{stem}.safetensors"}
    index = f"model.safetensors.index.{variant}.json" if variant else "model.safetensors.index.json"
    return {f"{stem}-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)} | {index}


SAVES = st.lists(st.tuples(st.sampled_from([None, "fp16", "int8"]), st.integers(1, 3)), min_size=1, max_size=5)


@settings(max_examples=40)
@given(SAVES)
@example([(None, 1), ("fp16", 2)])
@example([("fp16", 2), (None, 1)])
@example([(None, 3), (None, 1)])
@example([(None, 1), (None, 3)])
def test_after_many_saves_the_last_of_each_variant_is_what_is_there(tmp_path_factory, saves):
    """Neither a stale file, which `from_pretrained` might prefer, nor one variant's file lost to another's save."""
    target = tmp_path_factory.mktemp("saves")
    other = {"optimizer.pt", "adapter_model.safetensors", "model_card.safetensors.md", "pytorch_model.bin"}
    for name in other:
        (target / name).write_text("other")
    expected = {}
    for number, (variant, shards) in enumerate(saves):
        with staged(target) as folder:
            for name in names_of_weights(variant, shards):
                (folder / name).write_text(str(number))
        expected[variant] = {name: str(number) for name in names_of_weights(variant, shards)}
    expected = {name: text for files in expected.values() for name, text in files.items()}
    assert contents(target) == expected | dict.fromkeys(other, "other")


def test_what_was_staged_is_readable_json(tmp_path):
    with staged(tmp_path) as folder:
        write_weights(folder, TENSORS, "sharded safetensors")
    assert tensor_names(tmp_path) == set(TENSORS)
    assert set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) == set(TENSORS)


def test_the_umask_of_the_process_is_left_alone(tmp_path, monkeypatch):
    """It can be read only by setting another one, under which other threads would create their files."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("os.umask was called"))
    with staged(tmp_path / "model") as folder:
        write_weights(folder, TENSORS)
    assert tensor_names(tmp_path / "model") == set(TENSORS)
