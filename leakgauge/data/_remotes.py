"""The public data sets: where their files are at home, with the size and SHA-256 sum of each.

CIFAR: the sums that Keras and torchvision check; MNIST and Fashion-MNIST: those of TensorFlow
Datasets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class File:
    """A file as its home serves it."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Remote:
    """`files` at `home`, kept in `folder`; of an archive, the `members` that are unpacked there."""

    home: str
    folder: str
    files: tuple[File, ...]
    members: tuple[str, ...] = ()

    @property
    def contents(self) -> tuple[str, ...]:
        """The names in the finished folder."""
        return self.members or tuple(file.name for file in self.files)


IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _idx(*sums: tuple[int, str]) -> tuple[File, ...]:
    """The four files of MNIST and of sets in its form, by their size and SHA-256 sum."""
    return tuple(File(name, *of) for name, of in zip(IDX, sums, strict=True))


REMOTES: dict[str, Remote] = {
    "cifar10": Remote(
        "https://www.cs.toronto.edu/~kriz/",
        "cifar-10-batches-py",
        (
            File(
                "cifar-10-python.tar.gz",
                170498071,
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            ),
        ),
        (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta"),
    ),
    "cifar100": Remote(
        "https://www.cs.toronto.edu/~kriz/",
        "cifar-100-python",
        (
            File(
                "cifar-100-python.tar.gz",
                169001437,
                "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            ),
        ),
        ("train", "test", "meta"),
    ),
    "mnist": Remote(
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "MNIST/raw",
        _idx(
            (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
    ),
    "fashion-mnist": Remote(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "FashionMNIST/raw",
        _idx(
            (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
    ),
}


def by_hand(name: str, root: Path) -> str:
    """What to place where when there is no network."""
    remote = REMOTES[name]
    if remote.members:
        (file,) = remote.files
        return (
            f"By hand: place {remote.home}{file.name} (sha256 {file.sha256}) in {root} and run "
            f"`leakgauge data fetch {name}`, which then only unpacks it to {root / remote.folder}."
        )
    files = "".join(f"\n  {remote.home}{f.name} (sha256 {f.sha256})" for f in remote.files)
    return f"By hand: place these files in {root / remote.folder}:{files}"
