"""A server that speaks as much of the JSON API of Google Cloud Storage as checkpoints need, with objects in memory.

TensorStore, gcsfs and google-cloud-storage are all sent to it by variables of the environment: `address()` has them.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import sys
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import google_crc32c


class Bucket:
    """The objects of one bucket, by name: (bytes, generation, when it was made)."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.updated: dict[int, datetime] = {}  # of each generation
        self.lock = threading.Lock()
        self.generations = itertools.count(1)

    def put(self, name: str, data: bytes, wanted: str | None) -> int | None:
        """Returns the new generation; None where the one that is wanted to be there is another (0: none)."""
        with self.lock:
            there = self.objects[name][1] if name in self.objects else 0
            if wanted is not None and int(wanted) != there:
                return None
            generation = next(self.generations)
            self.updated[generation] = datetime.now(UTC)
            self.objects[name] = (data, generation)
            return generation


class Server:
    """Runs in a thread of its own until it is closed."""

    def __init__(self, name: str = "a-bucket") -> None:
        self.name, self.bucket = name, Bucket()
        self.uploads: dict[str, tuple[str, str | None, bytearray]] = {}
        self.requests: list[str] = []
        self.forbidden: tuple[str, ...] = ()  # methods that the account may not use
        owner = self

        class Handler(_Handler):
            server_state = owner

        self._http = _Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def address(self) -> dict[str, str]:
        """Returns the variables that send the libraries here."""
        return {
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "a-token",
            "STORAGE_EMULATOR_HOST": self.url,
            "FSSPEC_GCS_TOKEN": "anon",
            "GOOGLE_CLOUD_PROJECT": "a-project",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        if not isinstance(
            sys.exception(), ConnectionError
        ):  # gcsfs asks in two ways at once, and drops the slower answer
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server_state: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        body = self._body()
        self.server_state.requests.append(f"{method} {self.path}")
        if method in self.server_state.forbidden:
            status, headers, answer = _error(403, f"an-account does not have access to {method}")
        else:
            status, headers, answer = self._answer(method, self.path, body, self.headers)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, method, target, body, headers):
        """Returns (status, headers, body) of one request; a batch has several."""
        state, split = self.server_state, urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        path, bucket = split.path, state.bucket
        if path.startswith("/batch/"):
            return self._batch(body, headers)
        found = re.fullmatch(r"/(upload/|download/)?storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", path)
        if found is None:
            return _error(404, f"nothing is at {path}")
        if unquote(found[2]) != state.name:
            return _error(404, "there is no such bucket")
        if found[1] == "upload/":
            return self._upload(method, query, body, headers)
        name = found[3]
        if name is None:
            if path.endswith("/o"):
                return _json(self._list(query))
            return _json({"kind": "storage#bucket", "name": state.name, "id": state.name})
        if copied := re.fullmatch(r"(.+)/(?:rewriteTo/b/[^/]+|copyTo/b/[^/]+|moveTo)/o/(.+)", name):
            source, to = map(unquote, copied.groups())
            if source not in bucket.objects:
                return _error(404, "no such object")
            bucket.put(to, bucket.objects[source][0], None)
            if "/moveTo/" in name:
                bucket.objects.pop(source)
            facts = self._facts(to)
            return _json(
                {"done": True, "resource": facts, "objectSize": facts["size"]} if "rewriteTo" in name else facts
            )
        name = unquote(name)
        if name not in bucket.objects:
            return _error(404, "no such object")
        data, generation = bucket.objects[name]
        if method == "DELETE":
            wanted = query.get("ifGenerationMatch")
            if wanted is not None and int(wanted) != generation:
                return _error(412, "another generation")
            with bucket.lock:
                bucket.objects.pop(name, None)
            return 204, {}, b""
        if query.get("ifGenerationNotMatch") == str(generation):
            return 304, {}, b""
        if query.get("generation", str(generation)) != str(generation):
            return _error(404, "no such generation")
        if query.get("ifGenerationMatch", str(generation)) != str(generation):
            return _error(412, "another generation")
        if query.get("alt") != "media":
            return _json(self._facts(name))
        told = {
            "x-goog-generation": str(generation), "Content-Type": "application/octet-stream",
            "x-goog-stored-content-length": str(len(data)),
        }  # fmt: skip
        wanted = headers.get("Range") or headers.get("range")
        if wanted and data:
            first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted).groups()
            start = int(first) if first else max(0, len(data) - int(last))
            stop = int(last) + 1 if first and last else len(data)
            if start >= len(data):
                return 416, told, b""
            part = data[start:stop]
            return 206, told | {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"}, part
        return 200, told, data

    def _facts(self, name):
        data, generation = self.server_state.bucket.objects[name]
        updated = self.server_state.bucket.updated[generation].strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        crc = base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
        return {
            "kind": "storage#object", "name": name, "bucket": self.server_state.name, "size": str(len(data)),
            "generation": str(generation), "metageneration": "1", "crc32c": crc,
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            "timeCreated": updated, "updated": updated,
            "contentType": "application/octet-stream", "etag": str(generation), "storageClass": "STANDARD",
        }  # fmt: skip

    def _list(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        first, end = query.get("startOffset", ""), query.get("endOffset")
        items, prefixes = [], set()
        for name in sorted(self.server_state.bucket.objects):
            if not name.startswith(prefix) or name < first or (end is not None and name >= end):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                items.append(self._facts(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}

    def _upload(self, method, query, body, headers):
        state, kind = self.server_state, query.get("uploadType")
        if kind == "media":
            return self._put(query["name"], body, query.get("ifGenerationMatch"))
        if kind == "multipart":
            boundary = re.search(r"boundary=['\"]?([^'\";]+)", headers.get("Content-Type", ""))[1].encode()
            parts = [
                part.split(b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n", 1) for part in body.split(b"--" + boundary)
            ]
            facts, data = (part[1] for part in parts if len(part) == 2)
            data = data[:-2] if data.endswith(b"\r\n") else data[:-1]
            return self._put(json.loads(facts)["name"], data, query.get("ifGenerationMatch"))
        if "upload_id" not in query:
            number = str(len(state.uploads))
            name = query.get("name") or json.loads(body)["name"]
            state.uploads[number] = (name, query.get("ifGenerationMatch"), bytearray())
            place = f"{state.url}/upload/storage/v1/b/{state.name}/o?uploadType=resumable&upload_id={number}"
            return 200, {"Location": place}, b""
        name, wanted, data = state.uploads[query["upload_id"]]
        data += body
        total = (headers.get("Content-Range") or "/*").rpartition("/")[2]
        if total != "*" and int(total) == len(data):
            return self._put(name, bytes(data), wanted)
        return 308, {"Range": f"bytes=0-{len(data) - 1}"} if data else {}, b""

    def _put(self, name, data, wanted):
        generation = self.server_state.bucket.put(name, data, wanted)
        return _error(412, "another generation") if generation is None else _json(self._facts(name))

    def _batch(self, body, headers):
        boundary = re.search(r"boundary=['\"]?([^'\";]+)", headers["Content-Type"])[1]
        answers = []
        for part in body.decode().split(f"--{boundary}"):
            request = re.search(r"^(GET|DELETE|POST) (\S+) HTTP", part, re.MULTILINE)
            if request is None:
                continue
            number = re.search(r"Content-ID: <?([^>\r\n]+)>?", part, re.IGNORECASE)
            status, _, answer = self._answer(
                request[1], urlsplit(request[2])._replace(scheme="", netloc="").geturl(), b"", {}
            )
            identity = f"Content-ID: <response-{number[1]}>\r\n" if number else ""
            answers.append(
                f"--{boundary}\r\nContent-Type: application/http\r\n{identity}\r\nHTTP/1.1 {status} Answered\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n{answer.decode()}\r\n"
            )
        text = "".join(answers) + f"--{boundary}--"
        return 200, {"Content-Type": f"multipart/mixed; boundary={boundary}"}, text.encode()


def _json(value):
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _error(status, message):
    text = json.dumps({"error": {"code": status, "message": message, "errors": [{"reason": message}]}})
    return status, {"Content-Type": "application/json"}, text.encode()
