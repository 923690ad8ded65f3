"""Downloads public data sets, on request only.

Each file comes from its public home and must have the size and the SHA-256 sum of `_remotes.py`;
`source` names a mirror, never other sums.

Work happens in a hidden folder beside the target: files are downloaded there, checked, unpacked
there, and the finished folder is moved into place in one step. A fetch that was killed therefore
leaves nothing that a loader would find; the next one goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from leakgauge.config import did_you_mean
from leakgauge.data._options import as_path
from leakgauge.data._remotes import REMOTES, File, Remote, by_hand
from leakgauge.errors import DataError, PlanError

TIMEOUT = 30.0  # seconds without a byte
CHUNK = 1 << 18

Progress = Callable[[int, int | None], None]


def fetch(
    name: str,
    into: str | os.PathLike[str],
    *,
    source: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Download the set `name` into the data folder `into`; returns the folder with its files.

    `source` is the address of a mirror that holds the same files; `progress` is called with the
    bytes done and the bytes in all. A set that is already there is left alone.
    """
    if name not in REMOTES:
        raise PlanError(f"cannot fetch {name!r}{did_you_mean(name, REMOTES)}")
    remote = REMOTES[name]
    home = remote.home if source is None else source.rstrip("/") + "/"
    if not home.startswith(("http://", "https://")):
        raise PlanError(f"source must be an http or https address, got {source!r}.")
    root = as_path("into", into)
    target = root / remote.folder
    if target.exists():
        return _already_there(name, remote, target)

    staging = root / f".fetch-{name}"
    ready = staging / "ready"
    try:
        shutil.rmtree(ready, ignore_errors=True)  # half filled, if an earlier fetch was killed
        ready.mkdir(parents=True)
        files = _obtain(remote, home, root, staging, progress or (lambda done, total: None))
        if remote.members:
            _unpack(files[0], remote, ready)
        else:
            for file in files:
                os.replace(file, ready / file.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(ready, target)
        shutil.rmtree(staging, ignore_errors=True)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{name}: could not be fetched from {home} into {root}: {error}.\n"
            + by_hand(name, root)
        ) from error
    return target


def _already_there(name: str, remote: Remote, target: Path) -> Path:
    def present(file: str) -> bool:
        return any((target / f).is_file() for f in (file, file.removesuffix(".gz")))

    missing = [file for file in remote.contents if not present(file)]
    if missing:
        raise DataError(
            f"{name}: {target} exists but lacks {', '.join(missing)}; nothing was changed. "
            "Add them, or move the folder away and fetch again."
        )
    return target


def _obtain(remote: Remote, home: str, root: Path, staging: Path, progress: Progress) -> list[Path]:
    """Every file of the set on disk and checked: placed by hand, or downloaded to `staging`."""
    total, before, paths = sum(file.size for file in remote.files), 0, []
    for file in remote.files:
        path = root / file.name
        # Only archives: idx files of two sets have the same names.
        if not (remote.members and path.is_file()):
            path = staging / file.name
            for done in _download(home + file.name, file, path):
                progress(before + done, total)
        _check(path, file, keep=path.parent != staging)
        before += file.size
        paths.append(path)
    return paths


def _download(url: str, file: File, path: Path) -> Iterator[int]:
    """Download to `path`, from where an earlier try stopped; yields the bytes on disk."""
    have = path.stat().st_size if path.exists() else 0
    if have >= file.size:
        return
    request = urllib.request.Request(url, headers={"User-Agent": "leakgauge"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            path.unlink()  # what is here is no beginning of what is there: start anew next time
        raise
    with response:
        resumed = response.status == http.client.PARTIAL_CONTENT
        have = have if resumed else 0
        with path.open("ab" if resumed else "wb") as out:
            # One byte too many is enough to know that it is another file.
            while have <= file.size and (chunk := response.read(min(CHUNK, file.size + 1 - have))):
                out.write(chunk)
                have += len(chunk)
                yield have
    if have < file.size:
        raise DataError(
            f"{url}: expected {file.size} bytes, got {have}; the connection ended early. "
            "Run the same command again, it goes on from there."
        )


def _check(path: Path, file: File, keep: bool) -> None:
    """The file must be the one that was meant; a wrong download is removed."""
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found == file.sha256:
        return
    if not keep:
        path.unlink()
    raise DataError(
        f"{path}: expected sha256 {file.sha256}, got {found}: this is not the public file. "
        f"{'Remove it and' if keep else 'It was removed;'} try again, or name another source."
    )


def _unpack(archive: Path, remote: Remote, ready: Path) -> None:
    """Write the expected members, under names of our own; no path in the archive is ever used."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            inside = {member.name: member for member in tar.getmembers()}
            for name, member in inside.items():
                outside = name.startswith("/") or ".." in PurePosixPath(name).parts
                if outside or not (member.isreg() or member.isdir()):
                    raise DataError(
                        f"{archive}: refused, as its member {name!r} is a link or leaves its "
                        "folder; nothing was unpacked. Get the file from its public home."
                    )
            for name in remote.members:
                stream = tar.extractfile(f"{remote.folder}/{name}")
                if stream is None:
                    raise KeyError(f"{name} is not a file")
                with stream, (ready / name).open("wb") as out:
                    shutil.copyfileobj(stream, out)
    except (tarfile.TarError, EOFError, KeyError, OSError, zlib.error) as error:
        raise DataError(
            f"{archive}: cannot be unpacked ({error}); remove it, try again."
        ) from error
