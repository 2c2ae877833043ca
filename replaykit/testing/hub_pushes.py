"""The answers of a loopback Hub that change it: repositories, uploads, commits, branches, tags."""

from __future__ import annotations

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler
from typing import Any

from replaykit.testing.hub_repos import Repository, Source, is_lfs
from replaykit.testing.hub_state import HubState

__all__ = ["PushAnswers"]


class PushAnswers(BaseHTTPRequestHandler):
    """What a client asks of a Hub to push; mixed into the handler, which sends the answers.

    Whoever writes must show a token; which one does not matter.
    """

    body: bytes

    @property
    def state(self) -> HubState:
        raise NotImplementedError

    def _json(self, data: Any, headers: dict[str, str] | None = None, *, status: int = 200) -> None:
        raise NotImplementedError

    def _error(self, status: int, code: str | None, message: str) -> None:
        raise NotImplementedError

    def _has_token(self) -> bool:
        return bool(self.headers.get("Authorization", "").removeprefix("Bearer").strip())

    def _create(self, groups: dict[str, str]) -> None:
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or 'me'}/{asked['name']}"
        with self.state.writing:
            is_new = repo_id not in self.state.repos
            if is_new:
                private = bool(asked.get("private") or asked.get("visibility") == "private")
                repo = Repository(repo_id, private=private)
                repo.commit({".gitattributes": b"*.memmap filter=lfs\n"}, "main")
                self.state.repos[repo_id] = repo
        answer = {"url": f"{self.state.url}/datasets/{repo_id}", "name": repo_id, "id": repo_id}
        if not is_new:
            answer["error"] = "You already created this dataset repo"
        self._json(answer, status=200 if is_new else 409)

    def _validate(self, groups: dict[str, str]) -> None:
        text = json.loads(self.body)["content"]
        errors = [] if text.startswith("---\n") else [{"message": "the card has no YAML block"}]
        self._json({"errors": errors, "warnings": []})

    def _preupload(self, groups: dict[str, str]) -> None:
        repo = self.state.repos[groups["repo"]]
        head = repo.branches.get(groups["rev"])
        if head is None:
            return self._error(404, "RevisionNotFound", f"no branch {groups['rev']!r}")
        there = repo.commits[head].files
        answer = []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            entry = {"path": path, "shouldIgnore": False}
            entry["uploadMode"] = "lfs" if is_lfs(path) else "regular"
            if path in there:
                entry["oid"] = there[path].etag
            answer.append(entry)
        return self._json({"files": answer})

    def _lfs_batch(self, groups: dict[str, str]) -> None:
        repo = self.state.repos[groups["repo"]]
        objects = []
        for asked in json.loads(self.body)["objects"]:
            entry = {"oid": asked["oid"], "size": asked["size"]}
            if repo.content(asked["oid"]) is None:
                where = f"{self.state.url}/_lfs/{repo.id}/{asked['oid']}"
                entry["actions"] = {
                    "upload": {"href": where},
                    "verify": {"href": f"{where}/verify"},
                }
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def _lfs_put(self, groups: dict[str, str]) -> None:
        oid = groups["oid"]
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self._error(400, None, f"the content is not {oid}")
        self.state.repos[groups["repo"]].uploads[oid] = self.body
        return self._json({})

    def _lfs_verify(self, groups: dict[str, str]) -> None:
        asked = json.loads(self.body)
        held = self.state.repos[groups["repo"]].uploads.get(groups["oid"])
        if held is None or len(held) != asked["size"]:
            return self._error(404, None, f"{groups['oid']} has not been uploaded whole")
        return self._json({})

    def _commit(self, groups: dict[str, str]) -> None:
        repo, branch = self.state.repos[groups["repo"]], groups["rev"]
        if branch not in repo.branches:
            return self._error(404, "RevisionNotFound", f"no branch {branch!r}")
        changes: dict[str, Source | None] = {}
        parent = None
        for line in self.body.decode().splitlines():
            entry = json.loads(line)
            kind, value = entry["key"], entry["value"]
            if kind == "header":
                parent = value.get("parentCommit")
            elif kind == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                content = repo.content(value["oid"])
                if content is None:
                    return self._error(400, None, f"{value['path']} has not been uploaded")
                changes[value["path"]] = content
            elif kind == "deletedFile":
                changes[value["path"]] = None
            else:
                return self._error(400, None, f"no operation {kind!r}")
        with self.state.writing:
            if parent not in (None, repo.branches[branch]):
                return self._error(412, None, "A commit has happened since.")
            try:
                commit = repo.commit(changes, branch)
            except FileNotFoundError as error:
                return self._error(404, "EntryNotFound", str(error))
        url = f"{self.state.url}/datasets/{repo.id}/commit/{commit.id}"
        return self._json({"success": True, "commitUrl": url, "commitOid": commit.id})

    def _branch(self, groups: dict[str, str]) -> None:
        repo, name = self.state.repos[groups["repo"]], groups["rev"]
        start = repo.resolve(json.loads(self.body or b"{}").get("startingPoint") or "main")
        with self.state.writing:
            if name in repo.branches:
                return self._error(409, None, f"Reference already exists: {name}")
            if start is None:
                return self._error(404, "RevisionNotFound", "no such starting point")
            repo.branches[name] = start.id
        return self._json({})

    def _tag(self, groups: dict[str, str]) -> None:
        repo, commit = self.state.repos[groups["repo"]], None
        with self.state.writing:
            if self.command == "DELETE":
                if repo.tags.pop(groups["rev"], None) is None:
                    return self._error(404, "RevisionNotFound", f"no tag {groups['rev']!r}")
                return self._json({})
            name = json.loads(self.body)["tag"]
            commit = repo.resolve(groups["rev"])
            if name in repo.tags:
                return self._error(409, None, f"Tag already exists: {name}")
            if commit is None:
                return self._error(404, "RevisionNotFound", f"no revision {groups['rev']!r}")
            repo.tags[name] = commit.id
        return self._json({})
