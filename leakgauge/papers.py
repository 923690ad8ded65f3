"""What a method cites, said where it is written; here are the papers that files of several parts
cite."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

VENUES = {"article": "journal", "inproceedings": "booktitle", "misc": "howpublished"}


@dataclass(frozen=True)
class Paper:
    """A paper. `author` is as BibTeX has it: Surname, Name and Surname, Name. `link` is a web
    address, best https://doi.org/…; `fields` are further BibTeX fields, in order."""

    key: str
    author: str
    title: str
    year: int
    venue: str
    link: str
    kind: Literal["article", "inproceedings", "misc"] = "inproceedings"
    fields: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+", self.key):
            raise ValueError(f"key must be letters, digits, - and _, got {self.key!r}")
        if not re.fullmatch(r"https?://[^\s<>\"]+", self.link):  # it becomes a link in reports
            raise ValueError(f"link must be a web address (https://…), got {self.link!r}")

    def bibtex(self) -> str:
        doi = self.link.removeprefix("https://doi.org/")
        rows = [("author", self.author), ("title", self.title), ("year", str(self.year)),
                (VENUES[self.kind], self.venue), *self.fields,
                ("url", self.link) if doi == self.link else ("doi", doi)]  # fmt: skip
        lines = [f"  {name} = {{{value}}}," for name, value in rows]
        return "\n".join([f"@{self.kind}{{{self.key},", *lines, "}"])

    def line(self) -> str:
        """Authors: title. Venue, year."""
        names = [" ".join(reversed(n.split(", "))) for n in self.author.split(" and ")]
        stop = "" if self.title.endswith("?") else "."
        text = f"{', '.join(names)}: {self.title}{stop} {self.venue}, {self.year}."
        return text.replace("{", "").replace("}", "").replace("--", "–")


BONAWITZ2017 = Paper(
    "bonawitz2017",
    "Bonawitz, Keith and Ivanov, Vladimir and Kreuter, Ben and Marcedone, Antonio and McMahan, H."
    " Brendan and Patel, Sarvar and Ramage, Daniel and Segal, Aaron and Seth, Karn",
    "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
    2017,
    "ACM SIGSAC Conference on Computer and Communications Security",
    "https://doi.org/10.1145/3133956.3133982",
    fields=(("pages", "1175--1191"),),
)

FAN2025 = Paper(
    "fan2025",
    "Fan, Mingyuan and Wang, Fuyi and Chen, Cen and Zhou, Jianying",
    "Boosting Gradient Leakage Attacks: Data Reconstruction in Realistic {FL} Settings",
    2025,
    "34th USENIX Security Symposium",
    "https://www.usenix.org/conference/usenixsecurity25/presentation/fan-boosting",
    fields=(("isbn", "978-1-939133-52-6"),),
)
