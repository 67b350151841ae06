"""Uploading the folder of a saved model to the Hub, in one commit: the choice of files, and explanations of errors."""

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from toolkit.checkpoint import weights_among
from toolkit.files import read_json_object
from toolkit.model_card import published_card
from toolkit.paths import public_path, with_paths

SECRET = "it looks like a secret"

# Files that are not uploaded, by their path in the folder, and why.
LEFT_BEHIND = {
    r"(.*/)?(\.|__pycache__/).*": "hidden files and caches",
    r"(checkpoints|checkpoint-\d+)/.*": "checkpoints of the training",
    r"seed-\d+/.*": "the runs of single seeds",
    r"(logs|runs|wandb|mlruns)/.*|(.*/)?events\.out\.tfevents\..*": "logs of the training",
    r"predictions_\w+\.jsonl?": "predictions, which have the rows of the data",
    r"(.*/)?(optimizer|scheduler|scaler|rng_state\w*|random_states\w*|training_args)"
    r"\.(bin|pt|pth|pkl)": "the training's state",
    r"(.*/)?(id_(rsa|dsa|ecdsa|ed25519)|netrc|.*\.(pem|key|p12|pfx|env))": SECRET,
    r"(.*/)?(.*[-_.])?(token|secrets?|credentials?|passwords?)(\.(txt|json|ya?ml|ini|cfg))?": SECRET,
}

# Tokens of the Hub, of GitHub, OpenAI and Amazon, a password in a URL, a private key.
SECRET_TEXT = re.compile(
    rb"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16})"
    rb"|://[^/\s\"':@]+:[^/\s\"'@]+@|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
NEW_TOKEN = "create one with write access on {endpoint}/settings/tokens and give it by `hf auth login` or HF_TOKEN"

# Files of weights, and the probe of older ones.
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|probe\.json")


@dataclass
class Listing:
    """The files of a folder that are uploaded, by their path there, and those that are not, with the reason."""

    files: dict[str, Path | bytes]
    left: dict[str, str]


def push(
    listing: Listing,
    repo: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    pull_request: bool = False,
    message: str = "Upload model",
) -> tuple[CommitInfo, bool]:
    """Uploads these files to the repository `repo`, which is created if need be, in one commit.

    Args:
        listing: what `survey` returned for that repository.
        repo: "user/name".
        private: of a new repository; None: the default of the account. It must match an existing repository's.
        revision: the branch, which is created if need be; None: "main".
        pull_request: propose the commit instead.
        message: of the commit.

    Returns:
        The commit, and whether it changed anything.

    Raises:
        OSError: there is no token.
        ValueError: the repository is private and should be public, or the reverse.
        HfHubHTTPError, httpx's HTTPError, RuntimeError: the Hub refuses, or cannot be reached; see `explain`.
    """
    if get_token() is None:
        raise LocalTokenNotFoundError(f"There is no token; {NEW_TOKEN.format(endpoint=constants.ENDPOINT)}.")
    api = HfApi()
    if not pull_request:
        api.create_repo(repo, private=private, exist_ok=True)
    remote = api.model_info(repo)
    if private is not None and remote.private != private:
        is_now = "private" if remote.private else "public"
        raise ValueError(
            f"{repo} is {is_now} already; omit the flag, or change that on {constants.ENDPOINT}/{repo}/settings"
        )
    if revision is not None:
        if not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        remote = api.model_info(repo, revision=revision)
    existing = [file.rfilename for file in remote.siblings or []]
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in listing.files.items()]
    # Old weights under other names (sharded or in one file) could be opened instead of the new ones.
    stale = [name for name in existing if WEIGHTS.fullmatch(name) and name not in listing.files]
    operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
    # Not upload_folder, which makes several commits if hf_xet is installed: a push could end between two. The parent:
    # only the files seen above are removed; the commit fails if somebody else has pushed in between.
    commit = api.create_commit(
        repo, operations, commit_message=message, revision=revision, create_pr=pull_request, parent_commit=remote.sha
    )
    return commit, commit.oid != remote.sha


# ----------------------------------------------------------------------------------------------- the files to upload


def survey(folder: Path, repo: str, parity: Path | None = None) -> Listing:
    """Lists the files of `folder` to upload, with the completed model card. Requires no network, and writes nothing.

    Args:
        folder: as `save_pretrained` or a training command writes it.
        repo: the repository to upload to, "user/name".
        parity: a file that check_parity.py wrote with --json.

    Raises:
        OSError, ValueError: the folder holds no model that can be opened, or a secret in a file that the model needs;
            or README.md, metrics.json or `parity` cannot be read.
    """
    validate_repo_id(repo)
    if "/" not in repo:
        raise ValueError(f"REPO is {repo!r}; expected the name of a user or an organisation as well: user/{repo}")
    if not folder.is_dir():
        raise FileNotFoundError(f"FOLDER {folder} is not a folder")
    listing = Listing({}, {})
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if why := why_left(name, path):
            listing.left[name] = why
        elif path.is_file():
            listing.files[name] = path
    check_opens(folder, listing)
    architecture = (read_json_object(folder / "config.json").get("architectures") or ["Model"])[0]
    listing.files["README.md"] = published_card(folder, repo, architecture, parity).encode()
    if "recipe.yaml" in listing.files:
        listing.files["recipe.yaml"] = public_recipe(folder / "recipe.yaml").encode()
    token = get_token()
    for name, content in list(listing.files.items()):
        if (line := line_of_secret(content, token)) is None:
            continue
        if name in ("README.md", "config.json") or name.endswith(".py"):
            raise ValueError(f"{folder / name}, line {line}: {SECRET}, and the model requires this file; remove it")
        listing.left[name] = f"{SECRET}, in line {line}"
        del listing.files[name]
    check_opens(folder, listing)
    return listing


def public_recipe(path: Path) -> str:
    """A training run's recipe without absolute paths: only their last part is kept.

    Raises:
        ValueError: it is not YAML.
    """
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    return yaml.safe_dump(with_paths(recipe, public_path), sort_keys=False, allow_unicode=True)


def why_left(name: str, path: Path) -> str | None:
    """Why the file `name` is not uploaded; None if it is."""
    if path.is_dir():
        return "a link to a folder" if path.is_symlink() else None
    if not path.exists():
        return "a link to nothing"
    return next((why for pattern, why in LEFT_BEHIND.items() if re.fullmatch(pattern, name, re.IGNORECASE)), None)


def check_opens(folder: Path, listing: Listing) -> None:
    """Raises OSError or ValueError unless the files have the weights and the code that `from_pretrained` reads."""
    weights_among(list(listing.files), str(folder))
    auto_map = read_json_object(folder / "config.json").get("auto_map") or {}
    code = {reference.rpartition("--")[2] for reference in auto_map.values()}
    for module in sorted({reference.split(".")[0] for reference in code}):
        if f"{module}.py" not in listing.files:
            raise FileNotFoundError(f"{folder} has no {module}.py, which its config.json names in auto_map")


def line_of_secret(content: Path | bytes, token: str | None) -> int | None:
    """The line of the first secret, or of the user's own token; None if there is none. In files of weights only the
    token is searched for, because random bytes can match any pattern."""
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


def describe(listing: Listing) -> str:
    """The files with their sizes in bytes, and those that are left behind with the reason."""
    sizes = {
        name: len(content) if isinstance(content, bytes) else content.stat().st_size
        for name, content in sorted(listing.files.items())
    }
    lines = [f"{size:>15,}  {name}" for name, size in sizes.items()]
    lines.append(f"{sum(sizes.values()):>15,}  bytes in {len(sizes)} files")
    for why in dict.fromkeys(listing.left.values()):
        names = [name for name, reason in listing.left.items() if reason == why]
        shown = names if len(names) <= 5 else [*names[:4], f"… ({len(names)} files)"]
        lines.append(f"left behind: {', '.join(shown)}: {why}")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- errors

# What the statuses of the Hub's answers mean, and what to do.
STATUSES = {
    401: f"the Hub does not accept the token ({{status}}); {NEW_TOKEN}",
    403: "the token has no write access to {repo} ({status}); use one that has, a repository of your own, or "
    "--pull_request",
    404: "{repo} or its revision does not exist, or is private and not yours ({status})",
    **dict.fromkeys((409, 412), "somebody else has pushed to {repo} ({status}); look at it, and run this again"),
    500: "the Hub has an error ({status}); run this again later. Either all files are uploaded or none",
}


def explain(error: BaseException, repo: str) -> str:
    """What went wrong in a push to `repo`, and what to do. The user's token is masked."""
    cause, message = error, str(error)
    while cause is not None and not isinstance(cause, (HTTPError, OfflineModeIsEnabled)):
        cause = cause.__cause__
    if isinstance(cause, OfflineModeIsEnabled):
        message = "HF_HUB_OFFLINE is set; unset it to push"
    elif isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        if meaning := STATUSES.get(min(status, 500)):
            message = meaning.format(repo=repo, status=status, endpoint=constants.ENDPOINT)
        else:
            message = str(cause)
    elif cause is not None:
        message = (
            f"the Hub at {constants.ENDPOINT} cannot be reached, or closed the connection "
            f"({cause or type(cause).__name__}); check the network, the proxy and HF_ENDPOINT, and run it "
            "again. Either all files are uploaded or none"
        )
    token = get_token()
    return message.replace(token, "…") if token else message
