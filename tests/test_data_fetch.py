"""Downloads, from a server on this machine only."""

import gzip
import hashlib
import http.server
import io
import pickle
import socket
import struct
import tarfile
import threading
from importlib import import_module

import numpy as np
import pytest

from leakgauge.data import load
from leakgauge.errors import DataError, PlanError

fetching = import_module("leakgauge.data.fetch")
fetch, File, Remote = fetching.fetch, fetching.File, fetching.Remote

MEMBERS = fetching.REMOTES["cifar10"].members
FOLDER = "cifar-10-batches-py"


def cifar_files():
    rows = np.zeros((2, 3072), np.uint8)
    meta = pickle.dumps({b"label_names": [b"%d" % k for k in range(10)]})
    batch = pickle.dumps({b"data": rows, b"labels": [1, 2]})
    return {name: meta if name == "batches.meta" else batch for name in MEMBERS}


def archive(files, *extra):
    """A tar.gz of the files in the CIFAR folder, and of further members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        top = tarfile.TarInfo(FOLDER)
        top.type = tarfile.DIRTYPE
        members = [(tarfile.TarInfo(f"{FOLDER}/{name}"), data) for name, data in files.items()]
        for info, data in [(top, b""), *members, *extra]:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def described(name, content):
    return File(name, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def site():
    """A server of the dict it yields; `site.asked` keeps the requests (path, Range)."""

    class Site(dict):
        def __init__(self):
            super().__init__()
            self.asked = []

    served = Site()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            wanted = self.headers.get("Range")
            served.asked.append((self.path, wanted))
            content = served.get(self.path.lstrip("/"))
            if content is None:
                return self.send_error(404)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
            if wanted and start >= len(content):
                return self.send_error(416)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start:])
            return None

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    yield served
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cifar(site, monkeypatch):
    """CIFAR-10 in small: the archive is on the site, its size and sum are in the table."""

    def serve(content):
        site["cifar-10-python.tar.gz"] = content
        file = described("cifar-10-python.tar.gz", content)
        remote = Remote("https://home.invalid/", FOLDER, (file,), MEMBERS)
        monkeypatch.setitem(fetching.REMOTES, "cifar10", remote)
        monkeypatch.setattr(fetching, "CHUNK", 64)
        return remote

    serve(archive(cifar_files()))
    site.serve = serve
    return site


def nothing_to_load(root):
    with pytest.raises(DataError, match="leakgauge data fetch"):
        load("cifar10", root=root)
    return not (root / FOLDER).exists()


def test_the_sums_and_sizes_have_their_form():
    names = set()
    for remote in fetching.REMOTES.values():
        assert remote.home.startswith("https://")
        assert remote.home.endswith("/")
        for file in remote.files:
            assert len(bytes.fromhex(file.sha256)) == 32
            names.add((file.sha256, file.size))
    assert len(names) == 10  # all different


def test_fetch_then_load(cifar, tmp_path):
    seen = []
    folder = fetch("cifar10", tmp_path, source=cifar.url, progress=lambda *a: seen.append(a))
    assert folder == tmp_path / FOLDER
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == cifar_files()
    assert [f.name for f in tmp_path.iterdir()] == [FOLDER]  # no trace of the work
    assert load("cifar10", root=tmp_path).labels.tolist() == [1, 2] * 5
    size = len(cifar["cifar-10-python.tar.gz"])
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 3
    assert seen[-1] == (size, size)


def test_a_set_that_is_there_is_left_alone(cifar, tmp_path):
    fetch("cifar10", tmp_path, source=cifar.url)
    assert fetch("cifar10", tmp_path, source=cifar.url + "/gone") == tmp_path / FOLDER
    assert len(cifar.asked) == 1
    (tmp_path / FOLDER / "data_batch_3").unlink()
    with pytest.raises(DataError, match="exists but lacks data_batch_3"):
        fetch("cifar10", tmp_path, source=cifar.url)
    assert (tmp_path / FOLDER / "data_batch_2").exists()


def test_a_wrong_sum_leaves_nothing(cifar, tmp_path):
    good = cifar["cifar-10-python.tar.gz"]
    for wrong in (good[:-1] + bytes([good[-1] ^ 1]), good + b"more"):
        cifar["cifar-10-python.tar.gz"] = wrong
        with pytest.raises(DataError, match=r"expected sha256 .* got .*It was removed"):
            fetch("cifar10", tmp_path, source=cifar.url)
        assert nothing_to_load(tmp_path)
    cifar["cifar-10-python.tar.gz"] = good
    assert fetch("cifar10", tmp_path, source=cifar.url).is_dir()
    assert [wanted for _, wanted in cifar.asked] == [None] * 3  # never resumed from wrong bytes


def test_no_more_is_read_than_the_file_has(cifar, tmp_path):
    size = len(cifar["cifar-10-python.tar.gz"])
    cifar["cifar-10-python.tar.gz"] += b"x" * 10**6
    seen = []
    with pytest.raises(DataError, match="sha256"):
        fetch("cifar10", tmp_path, source=cifar.url, progress=lambda done, _: seen.append(done))
    assert max(seen) == size + 1


def test_a_truncated_download_goes_on_where_it_stopped(cifar, tmp_path):
    good = cifar["cifar-10-python.tar.gz"]
    cifar["cifar-10-python.tar.gz"] = good[:100]
    with pytest.raises(DataError, match=rf"expected {len(good)} bytes, got 100; .*again"):
        fetch("cifar10", tmp_path, source=cifar.url)
    assert nothing_to_load(tmp_path)
    cifar["cifar-10-python.tar.gz"] = good
    assert fetch("cifar10", tmp_path, source=cifar.url).is_dir()
    assert [wanted for _, wanted in cifar.asked] == [None, "bytes=100-"]


def test_a_killed_fetch_leaves_nothing_to_load_and_is_resumed(cifar, tmp_path):
    def kill(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", tmp_path, source=cifar.url, progress=kill)
    assert nothing_to_load(tmp_path)
    assert fetch("cifar10", tmp_path, source=cifar.url).is_dir()
    assert cifar.asked[1][1] is not None
    assert len(load("cifar10", root=tmp_path)) == 10


def test_killed_while_unpacking(cifar, tmp_path, monkeypatch):
    def kill(stream, out):
        out.write(stream.read(10))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", kill)
        with pytest.raises(KeyboardInterrupt):
            fetch("cifar10", tmp_path, source=cifar.url)
    assert nothing_to_load(tmp_path)
    fetch("cifar10", tmp_path, source=cifar.url)
    assert len(cifar.asked) == 1  # the archive was kept
    assert len(load("cifar10", root=tmp_path)) == 10


def test_a_server_with_a_shorter_file_does_not_block_for_ever(cifar, tmp_path):
    good = cifar["cifar-10-python.tar.gz"]
    cifar["cifar-10-python.tar.gz"] = good[:100]
    for words in ("connection ended early", "HTTP Error 416", "connection ended early"):
        with pytest.raises(DataError, match=words):
            fetch("cifar10", tmp_path, source=cifar.url)


def link(name, target, kind):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


@pytest.mark.parametrize(
    "member",
    [
        (tarfile.TarInfo("../evil"), b"x"),
        (tarfile.TarInfo(f"{FOLDER}/../../evil"), b"x"),
        (tarfile.TarInfo("/evil"), b"x"),
        link(f"{FOLDER}/readme", "/etc/passwd", tarfile.SYMTYPE),
        link(f"{FOLDER}/readme", "/etc/passwd", tarfile.LNKTYPE),
        link(f"{FOLDER}/test_batch", "../../evil", tarfile.SYMTYPE),
        link(f"{FOLDER}/pipe", "", tarfile.FIFOTYPE),
    ],
    ids=lambda member: f"{member[0].name}-{member[0].linkname}",
)
def test_a_malicious_member_is_refused(cifar, tmp_path, member):
    cifar.serve(archive(cifar_files(), member))
    root = tmp_path / "a" / "b"
    with pytest.raises(DataError, match="refused, as its member") as raised:
        fetch("cifar10", root, source=cifar.url)
    assert repr(member[0].name) in str(raised.value)
    assert nothing_to_load(root)
    assert not list(tmp_path.rglob("evil"))


def test_harmless_extra_members_are_not_unpacked(cifar, tmp_path):
    cifar.serve(archive(cifar_files(), (tarfile.TarInfo(f"{FOLDER}/readme.html"), b"<p>")))
    folder = fetch("cifar10", tmp_path, source=cifar.url)
    assert {f.name for f in folder.iterdir()} == set(MEMBERS)


def test_archives_that_are_not_what_was_meant(cifar, tmp_path):
    files = cifar_files()
    del files["test_batch"]
    whole = archive(cifar_files())
    for content in (archive(files), b"no archive", whole[: len(whole) // 2]):
        cifar.serve(content)
        with pytest.raises(DataError, match="cannot be unpacked"):
            fetch("cifar10", tmp_path, source=cifar.url)
        assert nothing_to_load(tmp_path)
        (tmp_path / ".fetch-cifar10" / "cifar-10-python.tar.gz").unlink()


def test_without_a_server_the_error_says_what_to_place_where(cifar, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(DataError) as raised:
        fetch("cifar10", tmp_path, source=f"http://127.0.0.1:{port}")
    message = str(raised.value)
    (file,) = fetching.REMOTES["cifar10"].files
    for part in ("https://home.invalid/" + file.name, file.sha256, str(tmp_path / FOLDER)):
        assert part in message
    with pytest.raises(DataError, match="HTTP Error 404"):
        fetch("cifar10", tmp_path, source=cifar.url + "/elsewhere/")


def test_an_archive_placed_by_hand_needs_no_network(cifar, tmp_path):
    placed = tmp_path / "cifar-10-python.tar.gz"
    placed.write_bytes(b"something else")
    with pytest.raises(DataError, match="Remove it and try again"):
        fetch("cifar10", tmp_path)
    placed.write_bytes(cifar["cifar-10-python.tar.gz"])
    fetch("cifar10", tmp_path)
    assert cifar.asked == []
    assert placed.exists()
    assert len(load("cifar10", root=tmp_path)) == 10


def test_idx_files_arrive_together(site, tmp_path, monkeypatch):
    for split in ("train", "t10k"):
        images = struct.pack(">4I", 2051, 2, 28, 28) + bytes(2 * 784)
        labels = struct.pack(">2I", 2049, 2) + bytes([3, 8])
        site[f"{split}-images-idx3-ubyte.gz"] = gzip.compress(images)
        site[f"{split}-labels-idx1-ubyte.gz"] = gzip.compress(labels)
    files = tuple(described(name, content) for name, content in site.items())
    monkeypatch.setitem(
        fetching.REMOTES, "mnist", Remote("https://home.invalid/", "MNIST/raw", files)
    )
    last = files[-1].name
    content = site.pop(last)
    with pytest.raises(DataError, match="404"):
        fetch("mnist", tmp_path, source=site.url)
    assert not (tmp_path / "MNIST").exists()
    site[last] = content
    seen = []
    folder = fetch("mnist", tmp_path, source=site.url, progress=lambda *a: seen.append(a))
    assert folder == tmp_path / "MNIST" / "raw"
    assert len(site.asked) == 5  # three files, a failure, and only the fourth again
    total = sum(file.size for file in files)
    assert seen == [(total, total)]
    assert load("mnist", root=tmp_path, split="test").labels.tolist() == [3, 8]


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("cifar", None, "did you mean 'cifar10'"),
        ("photos", None, "cannot fetch 'photos'; known: "),
        ("mnist", "file:///etc", "http or https address, got 'file:///etc'"),
    ],
)
def test_what_cannot_be_fetched(name, source, words, tmp_path):
    with pytest.raises(PlanError, match=words):
        fetch(name, tmp_path, source=source)


def test_a_folder_that_cannot_be_written(cifar, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="could not be fetched"):
        fetch("cifar10", tmp_path / "file", source=cifar.url)
