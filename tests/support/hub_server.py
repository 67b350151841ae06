"""A Hub for tests, on this machine: the part of its API that huggingface_hub needs to push and to open a model.

Repositories, commits, large files (LFS), and files as they are resolved, with the headers
that the client's cache goes by. Large files are fetched, as from the Hub, on another host, which gets no token.

Not there: Xet (set HF_HUB_DISABLE_XET=1), uploads in parts, files that are deleted, branches, pull requests, datasets,
gated repositories.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import transformers.utils.hub
from huggingface_hub import constants, hf_api

# In the form of a token of the Hub.
TOKEN = "hf_" + "Ada" * 12
# The Hub goes by .gitattributes and by size; this does for models.
LARGE = (".safetensors", ".bin", ".png")


@dataclass
class Blob:
    content: bytes
    is_large: bool

    @property
    def oid(self) -> str:
        """git's name of the content, or LFS' one."""
        if self.is_large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Commit:
    files: dict[str, Blob]
    title: str
    parent: str | None

    @property
    def sha(self) -> str:
        names = {name: blob.oid for name, blob in sorted(self.files.items())}
        return hashlib.sha1(json.dumps([names, self.title, self.parent]).encode()).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)  # "main": the commit

    def add(self, ref: str, commit: Commit) -> str:
        self.commits[commit.sha] = commit
        self.refs[ref] = commit.sha
        return commit.sha

    def find(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))


class Refused(Exception):  # noqa: N818, an answer
    def __init__(self, status: int, code: str = "", message: str = ""):
        super().__init__(status)
        self.status, self.code, self.message = status, code, message


@dataclass
class Hub:
    """What the server holds. `breaks(method, path)`, where it is True, has the connection break off there."""

    endpoint: str = ""
    users: dict[str, set[str]] = field(default_factory=dict)  # a token, and the names that it may write to
    repositories: dict[str, Repository] = field(default_factory=dict)
    large_files: dict[str, bytes] = field(default_factory=dict)
    breaks: Callable[[str, str], bool] = lambda method, path: False
    requests: list[tuple[str, str, bool]] = field(default_factory=list)  # method, path, whether with a token

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        return {name: blob.content for name, blob in self.repositories[repo].find(revision).files.items()}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def log_message(self, *args):
        pass

    def handle_request(self):
        url = urlsplit(self.path)
        self.hub.requests.append((self.command, url.path, "Authorization" in self.headers))
        if self.hub.breaks(self.command, url.path):
            # Half of what was coming has come.
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.body = self.read_body()
        try:
            for method, pattern, answer in ROUTES:
                if method == self.command.replace("HEAD", "GET") and (found := re.fullmatch(pattern, url.path)):
                    answer(self, *map(unquote, found.groups()))
                    return
            raise Refused(404, message=f"no route for {self.command} {url.path}")
        except Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            headers = {name: value for name, value in headers.items() if value}
            self.reply({"error": refused.message}, refused.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815, the names are http.server's

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def reply(self, content, status: int = 200, headers: dict | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), "Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # -- who may do what

    def names(self) -> set[str] | None:
        """Those that the token may write to; None without a token."""
        authorization = self.headers.get("Authorization", "")
        return self.hub.users.get(authorization.removeprefix("Bearer "))

    def readable(self, repo: str) -> Repository:
        names, repository = self.names(), self.hub.repositories.get(repo)
        if repository is None or (repository.private and repo.split("/")[0] not in (names or ())):
            raise Refused(404 if names is not None else 401, "RepoNotFound", "Repository not found")
        return repository

    def writable(self, repo: str) -> Repository:
        repository = self.readable(repo)
        if repo.split("/")[0] not in (self.names() or ()):
            raise Refused(403, message="you do not have the rights for this")
        return repository

    def commit_at(self, repo: str, revision: str) -> Commit:
        commit = self.readable(repo).find(revision)
        if commit is None:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # -- the API

    def create(self):
        asked = json.loads(self.body)
        owner = asked.get("organization") or min(self.names() or [None])
        if owner not in (self.names() or ()):
            raise Refused(403, message=f"you cannot create a repository in {owner}")
        repo = f"{owner}/{asked['name']}"
        answer = {"url": f"{self.hub.endpoint}/{repo}", "name": repo}
        if repo in self.hub.repositories:
            self.reply({**answer, "error": "You already created this model repo"}, 409)
            return
        self.hub.repositories[repo] = Repository(private=asked.get("visibility") == "private")
        attributes = Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", False)
        self.hub.repositories[repo].add("main", Commit({".gitattributes": attributes}, "initial commit", None))
        self.reply(answer)

    def info(self, repo: str, revision: str = "main"):
        commit = self.commit_at(repo, revision)
        siblings = [{"rfilename": name} for name in sorted(commit.files)]
        private = self.hub.repositories[repo].private
        self.reply({"id": repo, "sha": commit.sha, "private": private, "tags": [], "siblings": siblings})

    def tree(self, repo: str, revision: str, folder: str = ""):
        prefix = f"{folder}/" if folder else ""
        found = [
            {"type": "file", "path": name, "size": len(blob.content), "oid": blob.oid}
            for name, blob in sorted(self.commit_at(repo, revision).files.items())
            if name.startswith(prefix)
        ]
        if not found:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        self.reply(found)

    def preupload(self, repo: str, revision: str):
        self.writable(repo)
        there = self.commit_at(repo, revision).files
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": there[file["path"]].oid if file["path"] in there else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self.reply({"files": files})

    def batch(self, repo: str):
        asked = json.loads(self.body)
        self.writable(repo) if "ref" in asked else self.readable(repo)
        objects = []
        for each in asked["objects"]:
            upload = {"href": f"{self.hub.endpoint}/storage/{each['oid']}"}
            verify = {"href": f"{self.hub.endpoint}/{repo}.git/info/lfs/objects/verify"}
            actions = {} if each["oid"] in self.hub.large_files else {"actions": {"upload": upload, "verify": verify}}
            objects.append({**each, **actions})
        self.reply({"transfer": "basic", "objects": objects})

    def store(self, oid: str):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refused(400, message="the content is of another hash")
        self.hub.large_files[oid] = self.body
        self.reply({})

    def verify(self, repo: str):
        asked = json.loads(self.body)
        if len(self.hub.large_files.get(asked["oid"], b"")) != asked["size"]:
            raise Refused(404, message="no such object")
        self.reply({})

    def commit(self, repo: str, revision: str):
        repository = self.writable(repo)
        parent = self.commit_at(repo, revision)
        header, *changes = (json.loads(line) for line in self.body.splitlines())
        files = dict(parent.files)
        for change in changes:
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            else:
                assert change["key"] == "lfsFile", change
                files[value["path"]] = Blob(self.hub.large_files[value["oid"]], True)
        sha = repository.add(revision, Commit(files, header["value"]["summary"], parent.sha))
        self.reply({"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{sha}", "commitOid": sha})

    def resolve(self, repo: str, revision: str, name: str):
        commit = self.commit_at(repo, revision)
        about = {"X-Repo-Commit": commit.sha}
        if (blob := commit.files.get(name)) is None:
            self.reply({"error": "Entry not found"}, 404, {**about, "X-Error-Code": "EntryNotFound"})
        elif blob.is_large:
            about |= {"X-Linked-Etag": f'"{blob.oid}"', "X-Linked-Size": len(blob.content)}
            elsewhere = self.hub.endpoint.replace("127.0.0.1", "localhost")
            self.reply(b"", 302, {**about, "Location": f"{elsewhere}/storage/{blob.oid}"})
        else:
            self.reply(blob.content, 200, {**about, "ETag": f'"{blob.oid}"'})

    def fetch(self, oid: str):
        self.reply(self.hub.large_files[oid])

    def who(self):
        if not (names := self.names()):
            raise Refused(401, message="Invalid username or password.")
        self.reply({"type": "user", "name": min(names), "orgs": []})

    def check_card(self):
        self.reply({"errors": [], "warnings": []})


REPO = "([^/]+/[^/]+?)"
ROUTES = (
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.check_card),
    ("GET", "/api/whoami-v2", Handler.who),
    ("GET", f"/api/models/{REPO}", Handler.info),
    ("GET", f"/api/models/{REPO}/revision/([^/]+)", Handler.info),
    ("GET", f"/api/models/{REPO}/tree/([^/]+)", Handler.tree),
    ("GET", f"/api/models/{REPO}/tree/([^/]+)/(.+)", Handler.tree),
    ("POST", f"/api/models/{REPO}/preupload/([^/]+)", Handler.preupload),
    ("POST", f"/api/models/{REPO}/commit/([^/]+)", Handler.commit),
    ("POST", f"/{REPO}\\.git/info/lfs/objects/batch", Handler.batch),
    ("POST", f"/{REPO}\\.git/info/lfs/objects/verify", Handler.verify),
    ("PUT", "/storage/([0-9a-f]{64})", Handler.store),
    ("GET", "/storage/([0-9a-f]{64})", Handler.fetch),
    ("GET", f"/{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
)


@contextmanager
def serving(**users: set[str]):
    """A Hub that runs while the block does. `users`: a token, and the names that it may write to."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}", users)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()


def use(hub, patch: pytest.MonkeyPatch, cache: Path, token: str | None = None) -> None:
    """What HF_ENDPOINT and the like say to a new process, said to this one; `token` None: there is none."""
    patch.setattr(constants, "ENDPOINT", hub.endpoint)
    patch.setattr(hf_api.api, "endpoint", hub.endpoint)
    # The client of transformers keeps its first endpoint; older versions have none.
    patch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
    template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    if token is None:
        patch.delenv("HF_TOKEN", raising=False)
    else:
        patch.setenv("HF_TOKEN", token)
