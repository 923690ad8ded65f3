"""The papers behind the methods of an audit, as BibTeX and as one line.

Each method of a plan names its papers in `METHODS`: attacks, label rules, defences and metrics by
the name they have in the plan, and `federation`, `risk` for what every audit uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from leakgauge.report.contents import table, tables

Result = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """A paper. `fields` are BibTeX fields beyond author, title and year, in order."""

    key: str
    kind: str
    author: str
    title: str
    year: int
    fields: tuple[tuple[str, str], ...]

    @property
    def link(self) -> str:
        known = dict(self.fields)
        return f"https://doi.org/{known['doi']}" if "doi" in known else known["url"]

    def bibtex(self) -> str:
        rows = [("author", self.author), ("title", self.title), ("year", str(self.year))]
        lines = [f"  {name} = {{{value}}}," for name, value in [*rows, *self.fields]]
        return "\n".join([f"@{self.kind}{{{self.key},", *lines, "}"])

    def line(self) -> str:
        """Authors: title. Venue, year."""
        names = [" ".join(reversed(n.split(", "))) for n in self.author.split(" and ")]
        known = dict(self.fields)
        venue = known.get("journal") or known.get("booktitle") or known["howpublished"]
        stop = "" if self.title.endswith("?") else "."
        text = f"{', '.join(names)}: {self.title}{stop} {venue}, {self.year}."
        return text.replace("{", "").replace("}", "").replace("--", "–")


PAPERS = [
    Reference(
        "phong2018",
        "article",
        "Phong, Le Trieu and Aono, Yoshinori and Hayashi, Takuya and Wang, Lihua and Moriai, Shiho",
        "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption",
        2018,
        (
            ("journal", "IEEE Transactions on Information Forensics and Security"),
            ("volume", "13"),
            ("number", "5"),
            ("pages", "1333--1345"),
            ("doi", "10.1109/TIFS.2017.2787987"),
        ),
    ),
    Reference(
        "zhu2019",
        "inproceedings",
        "Zhu, Ligeng and Liu, Zhijian and Han, Song",
        "Deep Leakage from Gradients",
        2019,
        (
            ("booktitle", "Advances in Neural Information Processing Systems"),
            ("volume", "32"),
            ("url", "https://arxiv.org/abs/1906.08935"),
        ),
    ),
    Reference(
        "zhao2020",
        "misc",
        "Zhao, Bo and Mopuri, Konda Reddy and Bilen, Hakan",
        "{iDLG}: Improved Deep Leakage from Gradients",
        2020,
        (
            ("howpublished", "arXiv:2001.02610"),
            ("url", "https://arxiv.org/abs/2001.02610"),
        ),
    ),
    Reference(
        "geiping2020",
        "inproceedings",
        "Geiping, Jonas and Bauermeister, Hartmut and Dröge, Hannah and Moeller, Michael",
        "Inverting Gradients -- How Easy Is It to Break Privacy in Federated Learning?",
        2020,
        (
            ("booktitle", "Advances in Neural Information Processing Systems"),
            ("volume", "33"),
            ("pages", "16937--16947"),
            ("url", "https://arxiv.org/abs/2003.14053"),
        ),
    ),
    Reference(
        "yin2021",
        "inproceedings",
        "Yin, Hongxu and Mallya, Arun and Vahdat, Arash and Alvarez, Jose M. and Kautz, Jan "
        "and Molchanov, Pavlo",
        "See Through Gradients: Image Batch Recovery via {GradInversion}",
        2021,
        (
            ("booktitle", "IEEE/CVF Conference on Computer Vision and Pattern Recognition"),
            ("pages", "16332--16341"),
            ("doi", "10.1109/CVPR46437.2021.01607"),
        ),
    ),
    Reference(
        "fan2025",
        "inproceedings",
        "Fan, Mingyuan and Wang, Fuyi and Chen, Cen and Zhou, Jianying",
        "Boosting Gradient Leakage Attacks: Data Reconstruction in Realistic {FL} Settings",
        2025,
        (
            ("booktitle", "34th USENIX Security Symposium"),
            ("isbn", "978-1-939133-52-6"),
            ("url", "https://www.usenix.org/conference/usenixsecurity25/presentation/fan-boosting"),
        ),
    ),
    Reference(
        "ma2023",
        "inproceedings",
        "Ma, Kailang and Sun, Yu and Cui, Jian and Li, Dawei and Guan, Zhenyu and Liu, Jianwei",
        "Instance-wise Batch Label Restoration via Gradients in Federated Learning",
        2023,
        (
            ("booktitle", "International Conference on Learning Representations"),
            ("url", "https://openreview.net/forum?id=FIrQfNSOoTr"),
        ),
    ),
    Reference(
        "balle2018",
        "inproceedings",
        "Balle, Borja and Wang, Yu-Xiang",
        "Improving the {Gaussian} Mechanism for Differential Privacy: Analytical Calibration and "
        "Optimal Denoising",
        2018,
        (
            ("booktitle", "35th International Conference on Machine Learning"),
            ("series", "Proceedings of Machine Learning Research"),
            ("volume", "80"),
            ("pages", "394--403"),
            ("url", "https://proceedings.mlr.press/v80/balle18a.html"),
        ),
    ),
    Reference(
        "lin2018",
        "inproceedings",
        "Lin, Yujun and Han, Song and Mao, Huizi and Wang, Yu and Dally, William J.",
        "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
        2018,
        (
            ("booktitle", "International Conference on Learning Representations"),
            ("url", "https://openreview.net/forum?id=SkhQHMW0W"),
        ),
    ),
    Reference(
        "wang2004",
        "article",
        "Wang, Zhou and Bovik, Alan C. and Sheikh, Hamid R. and Simoncelli, Eero P.",
        "Image Quality Assessment: From Error Visibility to Structural Similarity",
        2004,
        (
            ("journal", "IEEE Transactions on Image Processing"),
            ("volume", "13"),
            ("number", "4"),
            ("pages", "600--612"),
            ("doi", "10.1109/TIP.2003.819861"),
        ),
    ),
    Reference(
        "zhang2018",
        "inproceedings",
        "Zhang, Richard and Isola, Phillip and Efros, Alexei A. and Shechtman, Eli "
        "and Wang, Oliver",
        "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric",
        2018,
        (
            ("booktitle", "IEEE/CVF Conference on Computer Vision and Pattern Recognition"),
            ("pages", "586--595"),
            ("doi", "10.1109/CVPR.2018.00068"),
        ),
    ),
    Reference(
        "mcmahan2017",
        "inproceedings",
        "McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth "
        "and {Agüera y Arcas}, Blaise",
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        2017,
        (
            (
                "booktitle",
                "20th International Conference on Artificial Intelligence and Statistics",
            ),
            ("series", "Proceedings of Machine Learning Research"),
            ("volume", "54"),
            ("pages", "1273--1282"),
            ("url", "https://proceedings.mlr.press/v54/mcmahan17a.html"),
        ),
    ),
]

METHODS: dict[str, tuple[str, ...]] = {
    "federation": ("mcmahan2017",),
    "risk": ("fan2025",),
    # attacks; a label rule of the same name has the same paper
    "analytic": ("phong2018",),
    "dlg": ("zhu2019",),
    "idlg": ("zhao2020",),
    "inverting-gradients": ("geiping2020",),
    # label rules
    "yin": ("yin2021",),
    "fedleak": ("fan2025",),
    "counts": ("ma2023",),
    # defences
    "clip-and-noise": ("balle2018",),
    "prune": ("lin2018",),
    # metrics
    "ssim": ("wang2004",),
    "lpips": ("zhang2018",),
}

LABEL_RULE = {"inverting-gradients": "counts", "idlg": "idlg"}
"""The label rule of an attack whose table in the plan names none."""


def used(result: Result) -> list[Reference]:
    """The papers of the methods a result used, in the order of PAPERS."""
    names = {"federation", "risk", *result["references"]}
    plan = result["plan"]
    for attack in tables(plan, "attack"):
        name = str(attack.get("name"))
        names |= {name, str(attack.get("labels", LABEL_RULE.get(name)))}
    names |= {str(defence.get("name")) for defence in tables(plan, "defence")}
    metrics = table(plan, "audit").get("metrics")
    names |= {str(metric) for metric in metrics} if isinstance(metrics, list) else set()
    keys = {key for name in names for key in METHODS.get(name, ())}
    return [paper for paper in PAPERS if paper.key in keys]


def bibtex(result: Result) -> str:
    """BibTeX of the methods a result used."""
    return "\n\n".join(paper.bibtex() for paper in used(result)) + "\n"
