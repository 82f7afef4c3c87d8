"""Downloads from a server of our own: whole, cut and resumed, wrong, and out of reach."""

import hashlib
import http.server
import os
import re
import socket
import threading

import pytest

from dp2_keras.data import DownloadError, download, fetch

CONTENT = bytes(range(256)) * 4000  # More than one chunk.
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT, or the part that is asked for, as the server's settings have it."""

    def do_GET(self):
        self.server.ranges.append(self.headers.get("Range"))
        if self.path != "/file.bin":
            return self.send_error(404)
        start = self._start()
        if start >= len(CONTENT):
            return self.send_error(416)
        self._send(start)

    def _start(self):
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(asked[1]) if asked and self.server.knows_range else 0

    def _send(self, start):
        body = CONTENT[start:]
        self.send_response(206 if start else 200)
        if start:
            first = start + self.server.shift
            self.send_header("Content-Range", f"bytes {first}-{len(CONTENT) - 1}/{len(CONTENT)}")
        if self.server.tells_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cut])

    def log_message(self, *arguments):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, address):
        """A client that hangs up is no news."""


@pytest.fixture
def server():
    server = Server(("127.0.0.1", 0), Handler)
    server.ranges, server.cut, server.shift = [], None, 0
    server.knows_range = server.tells_length = True
    server.url = f"http://127.0.0.1:{server.server_port}/file.bin"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "file.bin"


def part(path):
    return path.with_name(path.name + ".part")


def cut_short(server, path, size):
    """A download that ends early."""
    server.cut = size
    with pytest.raises(DownloadError, match=f"ended after {size:,} of {len(CONTENT):,} bytes; call again"):
        fetch(server.url, path, sha256=SHA256, progress=False)
    server.cut = None
    assert part(path).read_bytes() == CONTENT[:size] and not path.exists()


def assert_fetched(path):
    assert path.read_bytes() == CONTENT
    assert not part(path).exists()


@pytest.mark.parametrize("digest", [dict(sha256=SHA256), dict(md5=MD5)], ids=["sha256", "md5"])
@pytest.mark.parametrize("tells_length", [True, False])
def test_a_file_is_downloaded_whole(server, path, digest, tells_length):
    server.tells_length = tells_length
    assert fetch(server.url, path, progress=False, **digest) == str(path)
    assert_fetched(path)


def test_a_directory_gets_the_name_of_the_address(server, tmp_path):
    assert fetch(server.url, tmp_path, sha256=SHA256, progress=False) == str(tmp_path / "file.bin")
    assert_fetched(tmp_path / "file.bin")


def test_a_file_that_is_there_is_not_downloaded_again(server, path):
    for _ in range(2):
        fetch(server.url, path, sha256=SHA256, progress=False)
    assert len(server.ranges) == 1


def test_a_download_that_was_cut_goes_on_where_it_ended(server, path):
    cut_short(server, path, 300_000)
    fetch(server.url, path, sha256=SHA256, progress=False)
    assert server.ranges == [None, "bytes=300000-"]
    assert_fetched(path)


def test_a_server_that_ignores_range_sends_everything_again(server, path):
    cut_short(server, path, 300_000)
    server.knows_range = False
    fetch(server.url, path, sha256=SHA256, progress=False)
    assert_fetched(path)


def test_a_partial_file_that_is_already_whole_is_kept(server, path):
    path.parent.mkdir()
    part(path).write_bytes(CONTENT)
    fetch(server.url, path, sha256=SHA256, progress=False)
    assert_fetched(path)


def test_another_part_than_was_asked_for_is_refused(server, path):
    cut_short(server, path, 300_000)
    server.shift = 7
    with pytest.raises(DownloadError, match="another part than was asked for"):
        fetch(server.url, path, sha256=SHA256, progress=False)
    assert part(path).read_bytes() == CONTENT[:300_000]


@pytest.mark.parametrize("size", [300_000, len(CONTENT), len(CONTENT) + 5])
def test_a_spoilt_partial_file_is_found_and_the_next_call_starts_anew(server, path, size):
    path.parent.mkdir()
    part(path).write_bytes(b"x" * size)
    with pytest.raises(DownloadError, match="another sha256 hash"):
        fetch(server.url, path, sha256=SHA256, progress=False)
    assert not path.exists()
    fetch(server.url, path, sha256=SHA256, progress=False)
    assert_fetched(path)


def test_a_wrong_hash_is_an_error_and_leaves_nothing(server, path):
    with pytest.raises(DownloadError, match="another md5 hash than 0123"):
        fetch(server.url, path, md5="0123", progress=False)
    assert os.listdir(path.parent) == []


def test_a_file_that_is_there_with_a_wrong_hash_is_an_error_and_stays(server, tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"mine")
    with pytest.raises(DownloadError, match="the file that is there has another sha256 hash"):
        fetch(server.url, path, sha256=SHA256, progress=False)
    assert path.read_bytes() == b"mine" and server.ranges == []


def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("kind", ["unreachable", "missing"])
def test_an_error_names_the_file_the_address_and_the_place(server, path, kind):
    url = f"http://127.0.0.1:{unused_port()}/file.bin" if kind == "unreachable" else server.url + "x"
    with pytest.raises(DownloadError) as caught:
        fetch(url, path, sha256=SHA256, progress=False)
    message = str(caught.value)
    assert message.startswith(f"Could not get file.bin from {url}: ")
    assert ("refused" if kind == "unreachable" else "404") in message
    assert message.endswith(f"get the file by hand and put it at {path}")


def test_progress_is_shown_on_stderr_up_to_the_end(server, path, capsys):
    fetch(server.url, path, sha256=SHA256)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("file.bin: 1.0 of 1.0 MB (100%)\n")


@pytest.mark.parametrize("digests", [dict(), dict(sha256=SHA256, md5=MD5)])
def test_one_hash_must_be_given(digests, path):
    with pytest.raises(ValueError, match="One of `sha256` and `md5` must be given. Received: sha256="):
        fetch("http://127.0.0.1/", path, **digests)


def test_data_sets_are_kept_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("DP2_KERAS_HOME", "elsewhere")
    assert download.home() == "elsewhere"
    monkeypatch.delenv("DP2_KERAS_HOME")
    assert download.home() == os.path.join(os.path.expanduser("~"), ".dp2_keras")
