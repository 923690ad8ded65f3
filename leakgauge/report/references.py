"""The papers behind the methods of an audit, as BibTeX and as one line.

Each method of a plan names its papers in `METHODS`: attacks, label rules, defences and metrics by
the name they have in the plan, and `federation`, `risk` for what every audit uses.
"""

from __future__ import annotations

from leakgauge.audit.results import Result
from leakgauge.report.papers import PAPERS, Reference

METHODS: dict[str, tuple[str, ...]] = {
    "federation": ("mcmahan2017",),
    "risk": ("fan2025",),
    # attacks; a label rule of the same name has the same paper
    "analytic": ("phong2018",),
    "coarse-to-fine": ("zhu2025",),
    "dlg": ("zhu2019",),
    "exact-recursion": ("zhu2021", "dimitrov2024"),  # our own, on the ground of both
    "fedavg-epochs": ("dimitrov2022",),
    "idlg": ("zhao2020",),
    "inverting-gradients": ("geiping2020",),
    "agic": ("xu2022",),
    "bayes": ("balunovic2022",),
    "gradinversion": ("yin2021",),
    "hfgradinv": ("ye2024",),
    "sapag": ("wang2020",),
    "smooth-to-sharp": ("geiping2020",),  # our own, on the ground of this one
    # attacks that change the model
    "decepticons": ("fowl2023",),
    "fishing": ("wen2022",),
    "loki": ("zhao2024",),
    "robbing-the-fed": ("fowl2022",),
    "seer": ("garov2024",),
    "trap-weights": ("boenisch2023",),
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

LABEL_RULE = {
    "agic": "counts",
    "bayes": "counts",
    "coarse-to-fine": "counts",
    "fedavg-epochs": "counts",
    "fedleak": "counts",
    "gradinversion": "counts",
    "hfgradinv": "counts",
    "idlg": "idlg",
    "inverting-gradients": "counts",
    "sapag": "counts",
    "smooth-to-sharp": "counts",
}
"""The label rule of an attack whose table in the plan names none."""


def used(result: Result) -> list[Reference]:
    """The papers of the methods a result used, in the order of PAPERS."""
    names = {"federation", "risk", *result.references}
    for attack in result.plan.attack:
        name = str(attack["name"])
        names |= {name, str(attack.get("labels", LABEL_RULE.get(name)))}
    names |= {str(defence["name"]) for defence in result.plan.defence}
    names |= set(result.plan.audit.metrics)
    keys = {key for name in names for key in METHODS.get(name, ())}
    return [paper for paper in PAPERS if paper.key in keys]


def bibtex(result: Result) -> str:
    """BibTeX of the methods a result used."""
    return "\n\n".join(paper.bibtex() for paper in used(result)) + "\n"
