#!/usr/bin/env python
"""Uploads a saved model's folder to the Hub: weights, tokenizer, code, model card, evaluation results.

    push_to_hub.py my-model user/my-model --dry-run    what would go up and what would not; asks nobody
    push_to_hub.py my-model user/my-model --private
    push_to_hub.py my-model user/my-model --revision v2 --parity parity.json
    push_to_hub.py my-model somebody/a-model --pull-request

All goes up in one commit, so the repository has all of it or what it had before. A push that breaks off is run again;
large files that had arrived are not sent twice. Weights in the repository that the folder's replace are removed.

The card that goes up is FOLDER's README.md, with the repository's name where the model is opened, and with what it
lacks: the metadata, code that opens the model, the results in metrics.json, and the table of --parity. FOLDER itself
stays as it is.

Checkpoints and logs of the training, the optimizer's state, hidden files and what looks like a secret stay behind.

The token, with write access, is that of `hf auth login` or of HF_TOKEN.

Exit code: 0 pushed, or there is nothing new; 2 bad usage, or it cannot be pushed.
"""

import argparse
import json
import logging
import mmap
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    constants,
    get_token,
)
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from modeling_scratchbert.configuration_scratchbert import AUTO_MAP

from convert_checkpoint import TASKS, weights_among
from model_classes import class_name, short_name
from training_report import EXAMPLES, how_good, how_to_use, is_own, table

SECRET = "it looks like a secret"

# What stays behind, by its path in the folder, and why.
LEFT_BEHIND = {
    r"(.*/)?(\.|__pycache__/).*": "hidden files and caches",
    r"(checkpoints|checkpoint-\d+)/.*": "checkpoints of the training",
    r"(logs|runs|wandb|mlruns)/.*|(.*/)?events\.out\.tfevents\..*": "logs of the training",
    r"(.*/)?(optimizer|scheduler|scaler|rng_state\w*|random_states\w*|training_args)\.(bin|pt|pth|pkl)": (
        "the training's state"
    ),
    r"(.*/)?(id_(rsa|dsa|ecdsa|ed25519)|netrc|.*\.(pem|key|p12|pfx|env))": SECRET,
    r"(.*/)?(.*[-_.])?(token|secrets?|credentials?|passwords?)(\.(txt|json|ya?ml|ini|cfg))?": SECRET,
}

# Tokens of the Hub, of GitHub, OpenAI and Amazon, a password in a URL, a private key.
SECRET_TEXT = re.compile(
    rb"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16})"
    rb"|://[^/\s\"':@]+:[^/\s\"'@]+@|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")

# Of metrics.json, in the order of a card's table.
SPLITS = ("train", "validation", "test")


@dataclass
class Listing:
    """What of a folder goes up, by its path there, and what does not, with the reason."""

    files: dict[str, Path | bytes]
    left: dict[str, str]

    def size(self, name: str) -> int:
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size


def push(
    listing: Listing,
    repo: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    pull_request: bool = False,
    message: str = "Upload model",
) -> tuple[CommitInfo, bool]:
    """Puts these files into the repository `repo`, which is made if need be, as one commit.

    Args:
        listing: what `survey` found for that repository.
        repo: "user/name".
        private: None leaves it to the Hub's settings, or as it is.
        revision: the branch, which is made if need be; "main" if left out.
        pull_request: propose it instead.
        message: the commit's.

    Returns:
        The commit, and whether there was anything new.

    Raises:
        OSError: there is no token.
        ValueError: the repository is private and should be public, or the reverse.
        HfHubHTTPError, httpx's HTTPError, RuntimeError: the Hub refuses, or cannot be reached; see `explain`.
    """
    if get_token() is None:
        raise LocalTokenNotFoundError(
            f"there is no token: make one with write access on {constants.ENDPOINT}/settings/tokens and give it by "
            "`hf auth login` or HF_TOKEN"
        )
    api = HfApi()
    if not pull_request:
        api.create_repo(repo, private=private, exist_ok=True)
    there = api.model_info(repo)
    if private is not None and there.private != private:
        is_now = "private" if there.private else "public"
        raise ValueError(
            f"{repo} is {is_now} already; leave the flag out, or change that on {constants.ENDPOINT}/{repo}/settings"
        )
    if revision is not None:
        if not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        there = api.model_info(repo, revision=revision)
    # And not upload_folder, which makes several commits where hf_xet is installed: a push could end between two.
    commit = api.create_commit(
        repo,
        operations(listing, [file.rfilename for file in there.siblings or []]),
        commit_message=message,
        revision=revision,
        create_pr=pull_request,
        # What is removed is what was seen there: a push that came between is not to be mixed with this one.
        parent_commit=there.sha,
    )
    return commit, commit.oid != there.sha


def operations(listing: Listing, there: list[str]) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Of the commit that puts the files where `there` are some already. Old weights under another name, in shards or
    in one file, would be opened instead of the new."""
    stale = [name for name in there if WEIGHTS.fullmatch(name) and name not in listing.files]
    add = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in listing.files.items()]
    return add + [CommitOperationDelete(path_in_repo=name) for name in stale]


# ---------------------------------------------------------------------------------------------------- what goes up


def survey(folder: Path, repo: str, parity: Path | None = None) -> Listing:
    """Sorts the files of `folder`, and makes the card. Nobody is asked, and nothing is written.

    Args:
        folder: as `save_pretrained` or a training script leaves it.
        repo: where it will go, "user/name".
        parity: a file that check_parity.py wrote with --json.

    Raises:
        OSError, ValueError: the folder holds no model that can be opened, or a secret in a file that the model needs;
            or README.md, metrics.json or `parity` cannot be read.
    """
    validate_repo_id(repo)
    if "/" not in repo:
        raise ValueError(f"REPO is {repo!r}; it wants the user's or the organisation's name as well: user/{repo}")
    if not folder.is_dir():
        raise FileNotFoundError(f"FOLDER {folder} is no folder")
    listing = Listing({}, {})
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if why := why_left(name, path):
            listing.left[name] = why
        elif path.is_file():
            listing.files[name] = path
    check_opens(folder, listing)
    listing.files["README.md"] = card(folder, repo, parity)
    token = get_token()
    for name, content in list(listing.files.items()):
        if (line := line_of_secret(content, token)) is None:
            continue
        if name in ("README.md", "config.json") or name.endswith(".py"):
            raise ValueError(f"{folder / name}, line {line}: {SECRET}, and the model does not go without this file")
        listing.left[name] = f"{SECRET}, in line {line}"
        del listing.files[name]
    check_opens(folder, listing)
    return listing


def why_left(name: str, path: Path) -> str | None:
    """Why the file `name` stays behind, or None if it does not."""
    if path.is_dir():
        return "a link to a folder" if path.is_symlink() else None
    if not path.exists():
        return "a link to nothing"
    return next((why for pattern, why in LEFT_BEHIND.items() if re.fullmatch(pattern, name, re.IGNORECASE)), None)


def check_opens(folder: Path, listing: Listing) -> None:
    """Raises OSError or ValueError unless the files are a model that `from_pretrained` finds weights and code of."""
    weights_among(list(listing.files), str(folder))
    code = {reference.rpartition("--")[2] for reference in (fields_of(folder).get("auto_map") or {}).values()}
    for module in sorted({reference.split(".")[0] for reference in code}):
        if f"{module}.py" not in listing.files:
            raise FileNotFoundError(f"{folder} has no {module}.py, which its config.json names in auto_map")


def fields_of(folder: Path) -> dict:
    """Of its config.json."""
    fields = read_json(folder / "config.json")
    if not isinstance(fields, dict):
        raise ValueError(f"{folder / 'config.json'} has no fields")
    return fields


def read_json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def line_of_secret(content: Path | bytes, token: str | None) -> int | None:
    """Where the first thing that looks like a secret stands, or the user's own token; None if nowhere. Numbers, in
    files of weights, look like anything in time, so there it is the token alone."""
    if isinstance(content, bytes):
        return find_secret(content, token, SECRET_TEXT)
    if content.stat().st_size == 0:
        return None
    with content.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return find_secret(text, token, None if WEIGHTS.fullmatch(content.name) else SECRET_TEXT)


def find_secret(text, token: str | None, pattern: re.Pattern | None) -> int | None:
    start = text.find(token.encode()) if token else -1
    if start < 0 and pattern is not None and (found := pattern.search(text)):
        start = found.start()
    return None if start < 0 else text[:start].count(b"\n") + 1


# ---------------------------------------------------------------------------------------------------- the card


def card(folder: Path, repo: str, parity: Path | None) -> bytes:
    """The model card that goes up.

    Raises:
        ValueError: README.md, metrics.json or `parity` cannot be read as what it should be.
    """
    path = folder / "README.md"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else f"\n# {repo.split('/')[1]}\n"
        data = ModelCard(text).data.to_dict()
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} has metadata that cannot be read, and that the Hub would refuse: {error}") from error
    architecture = (fields_of(folder).get("architectures") or ["Model"])[0]
    wanted = {
        "library_name": "transformers",
        "pipeline_tag": TASKS.get(short_name(architecture), "feature-extraction"),
        "tags": ["scratchbert"] if is_own(architecture) else None,
    }
    text = with_metadata(text, {name: value for name, value in wanted.items() if value and not data.get(name)})
    text = with_repository(text, folder.resolve().name, repo)
    if "## Results" not in text and (metrics := metrics_of(folder)):
        text += f"\n{how_good(metrics)}"
    if "from_pretrained(" not in text:
        text += f"\n{usage(repo, architecture)}"
    if parity is not None:
        text += f"\n{parity_section(parity)}"
    return text.encode("utf-8")


def with_metadata(text: str, missing: dict) -> str:
    """The card with these fields at the end of its metadata, and all else to the letter as it was."""
    if not missing:
        return text
    block = yaml.safe_dump(missing, sort_keys=False).rstrip()
    if found := REGEX_YAML_BLOCK.search(text):
        return f"{text[: found.end(2)]}\n{block}{text[found.end(2) :]}"
    return f"---\n{block}\n---\n{text}"


def with_repository(text: str, folder_name: str, repo: str) -> str:
    """The card with the repository's name where code opens the model by the folder's."""
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    names = {folder_name, heading[1].strip() if heading else folder_name}
    opening = rf'((?:from_pretrained|SentenceTransformer)\(")(?:{"|".join(map(re.escape, names))})"'
    return re.sub(opening, lambda found: f'{found[1]}{repo}"', text)


def metrics_of(folder: Path) -> dict[str, dict]:
    """By split, of metrics.json if there is one."""
    path = folder / "metrics.json"
    report = read_json(path) if path.exists() else {}
    if not isinstance(report, dict):
        raise ValueError(f"{path} is no table of metrics by split")
    return {split: report[split] for split in SPLITS if isinstance(report.get(split), dict)}


def usage(repo: str, architecture: str) -> str:
    """Code that opens the model, and, of the classes that have an example, uses it."""
    short = short_name(architecture)
    if short in EXAMPLES:
        return how_to_use(repo, architecture)
    path = f"modeling_scratchbert.{class_name(short, 'scratchbert')}"
    auto = next((auto for auto, opened in AUTO_MAP.items() if opened == path), "AutoModel")
    trust = ", trust_remote_code=True" if is_own(architecture) else ""
    return f"""\
## Use

```python
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}"{trust})
model = {auto}.from_pretrained("{repo}"{trust})
```
"""


def parity_section(path: Path) -> str:
    """The table that check_parity.py wrote with --json. Paths from a disk's root show their last part alone."""
    report = read_json(path)
    try:
        rows = [row for row in report["rows"] if row["kind"] != "gradient"]
        numbers = [
            (row["what"], "×".join(map(str, row["shape"])), row["max_abs"], row["own_error"],
             "equal" if row["equal"] else "DIFFERS")
            for row in rows
        ]  # fmt: skip
        lines = [f"- model: {report['model']}", f"- reference: {report['reference']}", f"- batch: {report['batch']}"]
        lines += [f"- not compared: {name}" for name in report["not_compared"]]
        verdict = report["verdict"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not what check_parity.py --json writes: {error!r}") from error
    head = re.sub(r"(?<!\w)(~|[A-Za-z]:)?[/\\][^\s,;]*[/\\]", "", "\n".join(lines))
    header = ["what", "shape", "max abs", "the reference's own error", "verdict"]
    return f"## Parity\n\n{head}\n\n{table(header, numbers)}\n{verdict}\n"


# ---------------------------------------------------------------------------------------------------- the command line


def explain(error: BaseException, repo: str) -> str:
    """What went wrong, in one line, and what to do about it."""
    for cause in causes(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set; a push wants it unset"
        if isinstance(cause, HfHubHTTPError):
            return refusal(cause, repo)
        if isinstance(cause, HTTPError):
            return (
                f"the Hub at {constants.ENDPOINT} cannot be reached, or broke off ({cause or type(cause).__name__}): "
                "check the network, the proxy and HF_ENDPOINT and run it again; all of it arrives, or nothing"
            )
    return str(error)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def refusal(error: HfHubHTTPError, repo: str) -> str:
    status = error.response.status_code
    if status == 401:
        return (
            f"the Hub does not accept the token (401): make one with write access on {constants.ENDPOINT}"
            "/settings/tokens and give it by `hf auth login` or HF_TOKEN"
        )
    if status == 403:
        return (
            f"the token may not write to {repo} (403): use one that may, a repository of your own, or --pull-request, "
            "which asks its owner"
        )
    if status == 404:
        return f"there is no {repo}, or no such revision in it, or it is private and not yours (404)"
    if status in (409, 412):
        return f"somebody else has pushed to {repo} in the meantime ({status}): look at it, and run this again"
    if status >= 500:
        return f"the Hub is out of order ({status}): run this again later; all of it arrives, or nothing"
    return str(error)


def describe(listing: Listing) -> str:
    sizes = {name: listing.size(name) for name in sorted(listing.files)}
    lines = [f"{size:>15,}  {name}" for name, size in sizes.items()]
    lines.append(f"{sum(sizes.values()):>15,}  bytes in {len(sizes)} files")
    for why in dict.fromkeys(listing.left.values()):
        names = [name for name, reason in listing.left.items() if reason == why]
        shown = names if len(names) <= 5 else [*names[:4], f"… ({len(names)} files)"]
        lines.append(f"left behind: {', '.join(shown)}: {why}")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    summary, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="push_to_hub.py",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the saved model")
    parser.add_argument("repo", metavar="REPO", help="where to: user/name")
    visibility = parser.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", default=None, help="a new repository is for you alone")
    visibility.add_argument("--public", dest="private", action="store_false", help="a new one is for all to see")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--revision", metavar="BRANCH", help="the branch, made if need be (default: main)")
    place.add_argument("--pull-request", action="store_true", help="propose it to the repository's owner")
    parser.add_argument("--parity", metavar="FILE", type=Path, help="of check_parity.py --json, for the card")
    parser.add_argument("--message", default="Upload model", help="of the commit (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="list what would go up, and ask nobody")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    args = parse(argv)
    logging.disable(logging.WARNING)  # retries; what matters comes back as an error
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        listing = survey(args.folder, args.repo, args.parity)
        print(describe(listing))
        if args.dry_run:
            print("dry run: nothing was sent")
            return 0
        commit, is_new = push(
            listing,
            args.repo,
            private=args.private,
            revision=args.revision,
            pull_request=args.pull_request,
            message=args.message,
        )
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        line = " ".join(explain(error, args.repo).split())
        # Whatever a server answers: the token is nobody's business.
        line = line.replace(token, "…") if (token := get_token()) else line
        print(f"push_to_hub.py: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"push_to_hub.py: interrupted; run it again to push to {args.repo}", file=sys.stderr)
        return 130
    print(f"pushed to {commit.pr_url or commit}" if is_new else f"{args.repo} has all of it already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
