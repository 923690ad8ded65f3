"""What the reproduction board runs, as plain data, most important first. See `board.py`.

FedLeak is Fan et al., USENIX Security 2025; C2F is the coarse-to-fine attack of Zhu et al., 2026.
Iterations are chosen on TUNE pairs so that the attacks of one setup take about equal CPU-seconds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Setup:
    """A federation to attack. `words` name the paper's table and how this setup differs from it."""

    name: str
    title: str
    words: str
    model: str = "resnet-10"
    init: str = "kaiming-normal-fan-out"
    width: float = 1.0
    activation: str = "relu"
    data: Literal["cifar10", "photos"] = "cifar10"
    size: int = 32
    batch: int = 1
    steps: int = 1
    lr: float = 0.01
    batch_norm: Literal["eval", "train"] = "eval"
    rounds: int = 0
    cheap: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"width": self.width, "activation": self.activation}

    @property
    def mean(self) -> tuple[float, ...]:
        return CIFAR_MEAN if self.data == "cifar10" else (0.0,)

    @property
    def std(self) -> tuple[float, ...]:
        return CIFAR_STD if self.data == "cifar10" else (1.0,)


@dataclass(frozen=True)
class Row:
    """An attack on a setup. `paper` is the published PSNR; `facts` of its guess go to the notes."""

    setup: Setup
    attack: str
    options: dict[str, Any] = field(default_factory=dict)
    runs: int = 10
    paper: float | None = None
    variant: str = ""
    facts: tuple[str, ...] = ()
    here: bool = True

    @property
    def id(self) -> str:
        return f"{self.setup.name}/{self.attack}" + (f"-{self.variant}" if self.variant else "")

    @property
    def label(self) -> str:
        return f"{self.attack}, {self.variant}" if self.variant else self.attack

    @property
    def fingerprint(self) -> str:
        """Changes with everything that changes the outcome of a run, and with nothing else."""
        s = self.setup
        what = (s.model, s.init, s.width, s.activation, s.data, s.size, s.batch, s.steps, s.lr,
                s.batch_norm, s.rounds, self.attack, sorted(self.options.items()))  # fmt: skip
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


IG, C2F, FEDLEAK, OURS = (
    "inverting-gradients",
    "coarse-to-fine",
    "fedleak",
    "smooth-to-sharp",
)
ADAM = {"optimiser": "adam", "lr": 0.1}  # as C2F runs iDLG; L-BFGS is for the small networks
OTHERS: dict[str, dict[str, Any]] = {
    "dlg": ADAM,
    "idlg": ADAM,
    "sapag": {},
    "agic": {},
    "hfgradinv": {},
    "gradinversion": {},
    "bayes": {},
}
PRINTED = {"variant": "printed"}
IN_GENERATOR = {"space": "generator"}

COST = {
    C2F: (1.25, 1.0),
    OURS: (1.45, 1.2),
    f"{OURS}-activations": (2.0, 1.6),
    f"{OURS}-generator": (1.6, 1.6),
    FEDLEAK: (2.0, 2.6),
    f"{FEDLEAK}-pixels": (2.0, 2.1),
    f"{FEDLEAK}-printed": (4.0, 6.0),
    f"{IG}-generator": (1.2, 1.3),
    "dlg": (2.3, 1.2),
    "idlg": (2.3, 1.2),
    "sapag": (1.1, 1.1),
    "agic": (1.6, 1.3),
}
"""An iteration in iterations of Inverting Gradients, from `--calibrate` (TUNE pairs): of ResNet-18
on 32 × 32, of the twins on 16 × 16."""


def row(setup: Setup, attack: str, iterations: int, /, variant: str = "", **fields: Any) -> Row:
    """A row whose CPU-seconds are those of so many iterations of Inverting Gradients."""
    options = dict(OTHERS.get(attack, {})) | fields.pop("options", {})
    name = f"{attack}-{variant}" if variant else attack
    options["iterations"] = round(iterations / COST.get(name, (1.0, 1.0))[setup.size == 16])
    return Row(setup, attack, options, variant=variant, **fields)


TWIN = "Twin: ResNet-10 of {} width, images averaged down to 16 × 16. "

# --- (a) C2F, Tables 1 and 2: ResNet-18 -----------------------------------------------------------

INITS = {
    "normal": ("kaiming-normal-fan-out", "Kaiming-normal, fan-out"),
    "uniform": ("kaiming-uniform-fan-out", "Kaiming-uniform, fan-out"),
    "orthogonal": ("orthogonal", "orthogonal"),
    "fan-in": ("kaiming-normal-fan-in", "Kaiming-normal, fan-in"),
}
C2F_WORDS = (
    "CIFAR-10, 32 × 32, ResNet-18, batch 1, one step, eval batch norm, normalised images. "
    "Paper: C2F, {table}; means over 20 images, best of 5 tries of 30,000 iterations per stage. "
    "C2F does not name its fan mode; fan-out is torchvision's. Its Transfer (ImageNet weights) is "
    "left out: no such weights come with this project."
)
C2F_SETUPS = {
    short: Setup(
        f"c2f-{short}",
        f"ResNet-18, {words}, batch 1",
        C2F_WORDS.format(
            table="Table 1 (Normal)"
            if short == "normal"
            else "Table 2 gives only the mean over its four initialisations"
        ),
        model="resnet-18",
        init=init,
    )
    for short, (init, words) in INITS.items()
}
TABLE_1 = {IG: 22.650, C2F: 47.737, FEDLEAK: 14.048, "hfgradinv": 16.516, "agic": 22.613,
           "sapag": 11.376, "idlg": 25.495}  # fmt: skip
TABLE_2 = {IG: 32.917, C2F: 41.439, "hfgradinv": 22.901, "agic": 26.656}

A_ITERATIONS = 500
A = [row(C2F_SETUPS["normal"], a, A_ITERATIONS, paper=TABLE_1.get(a)) for a in (IG, C2F, OURS)]
A += [row(C2F_SETUPS["normal"], FEDLEAK, A_ITERATIONS, runs=3, paper=TABLE_1[FEDLEAK])]
A += [row(C2F_SETUPS["normal"], a, A_ITERATIONS, runs=3, paper=TABLE_1.get(a)) for a in OTHERS]
A += [row(C2F_SETUPS["normal"], FEDLEAK, A_ITERATIONS, "printed", options=PRINTED, runs=3)]
A += [
    row(C2F_SETUPS[short], a, A_ITERATIONS, runs=runs, here=a in (IG, C2F, OURS))
    for short, runs in (("uniform", 3), ("orthogonal", 3), ("fan-in", 4))
    for a in (IG, C2F, OURS, FEDLEAK, *OTHERS)
]

# --- (g) batches in eval mode ---------------------------------------------------------------------

G_WORDS = (
    "CIFAR-10, Kaiming-normal fan-out, one step. No table: C2F, Fig. 11 shows curves on ResNet-18."
)
G_SETUPS = [
    Setup(
        f"batch-{size}-twin",
        f"Batch {size}, eval batch norm, twin",
        TWIN.format("half") + G_WORDS,
        width=0.5,
        size=16,
        batch=size,
    )
    for size in (4, 8)
] + [
    Setup(f"batch-{size}", f"Batch {size}, eval batch norm, ResNet-10", G_WORDS, batch=size)
    for size in (4, 8)
]
G = [
    row(
        s,
        a,
        500 if s.size == 16 else 200,
        runs={4: 3, 8: 2}[s.batch],
    )
    for s in G_SETUPS
    for a in (IG, OURS, FEDLEAK)
]
G += [  # with what the exact recursion reads as extra targets
    row(s, OURS, 500, "activations", options={"activations": 1.0}, runs={4: 3, 8: 2}[s.batch])
    for s in G_SETUPS
    if s.size == 16
]

# --- (h) generator against pixels, Sigmoid and train mode -----------------------------------------

H_SETUPS = [
    Setup(
        f"released-{size}",
        f"FedLeak's released setup, batch {size}: Sigmoid, train batch norm",
        TWIN.format("half") + "CIFAR-10, Kaiming-normal fan-out, one step. Does the search space "
        "matter? Paper: FedLeak gives no table of it.",
        width=0.5,
        size=16,
        batch=size,
        activation="sigmoid",
        batch_norm="train",
    )
    for size in (4, 16)
]
H_RUNS = {4: 3, 16: 1}
H = [
    row(s, attack, 300, variant, options=options, runs=H_RUNS[s.batch])
    for s in H_SETUPS
    for attack, variant, options in (
        (FEDLEAK, "", {}),
        (FEDLEAK, "pixels", {"space": "pixels", "lr": 0.1}),  # IG's rate: 0.01 is for generators
        (IG, "", {}),
        (IG, "generator", {"space": "generator", "lr": 0.01}),
        (OURS, "", {}),
        (OURS, "generator", IN_GENERATOR),
    )
]

# --- (d) FedLeak, Table 9: local steps ------------------------------------------------------------

TABLE_9 = {
    1: (8.82, 18.40),
    2: (8.44, 16.74),
    4: (8.53, 15.57),
    8: (8.28, 14.34),
    12: (8.59, 13.55),
}
D_SETUPS = [
    Setup(
        f"steps-{steps}",
        f"{steps} local step{'s' if steps > 1 else ''} of batch 4, Sigmoid, train batch norm",
        TWIN.format("quarter") + "CIFAR-10, Kaiming-normal fan-out, Sigmoid, train batch norm, lr "
        "10⁻⁴. Paper: FedLeak, Table 9: Lung-Colon Cancer, 224 × 224, batch 16, pretrained.",
        width=0.25,
        size=16,
        batch=4,
        steps=steps,
        lr=1e-4,
        activation="sigmoid",
        batch_norm="train",
    )
    for steps in TABLE_9
]
D = [
    row(s, a, 400, runs={1: 3, 2: 2}.get(s.steps, 1), paper=TABLE_9[s.steps][k])
    for s in D_SETUPS
    for k, a in enumerate((IG, FEDLEAK))
]

# --- (b) the twin of (a): all attacks, all initialisations ----------------------------------------

B_SETUPS = {
    short: Setup(
        f"twin-{short}",
        f"Twin of ResNet-18, {words}, batch 1",
        TWIN.format("half")
        + "CIFAR-10, batch 1, one step, eval batch norm. Paper: C2F, "
        + ("Table 1." if short == "normal" else "Table 2, the mean over four initialisations."),
        width=0.5,
        size=16,
        init=init,
    )
    for short, (init, words) in INITS.items()
}
B = [
    row(s, a, 300, paper=(TABLE_1 if short == "normal" else TABLE_2).get(a))
    for short, s in B_SETUPS.items()
    for a in (IG, C2F, OURS, FEDLEAK, *OTHERS)
]  # fmt: skip
B += [row(B_SETUPS["normal"], FEDLEAK, 300, "printed", options=PRINTED)]
COARSE = "coarse stage alone"  # from the same start: what the fine stage begins with
LONGER = "five times longer"
TWO_STAGES = {"": COARSE, LONGER: f"{LONGER}, {COARSE}"}  # both stages, and the first alone
B += [
    row(B_SETUPS["normal"], C2F, 150, COARSE, options={"coarse": 1.0}),
    row(B_SETUPS["normal"], C2F, 1500, LONGER, runs=4),
    row(B_SETUPS["normal"], C2F, 750, TWO_STAGES[LONGER], options={"coarse": 1.0}, runs=4),
]

# --- (f) activation and mode of batch norm --------------------------------------------------------

F_SETUPS = [
    Setup(
        f"mode-{activation}-{mode}",
        f"{activation.replace('relu', 'ReLU').replace('s', 'S')}, {mode} batch norm, batch 4",
        TWIN.format("quarter") + "CIFAR-10, Kaiming-normal fan-out, one step. Paper: C2F, Appendix "
        "B shows that both matter, without a table.",
        width=0.25,
        size=16,
        batch=4,
        activation=activation,
        batch_norm=mode,
    )
    for activation in ("relu", "sigmoid")
    for mode in ("eval", "train")
]
F = [row(s, a, 300, runs=3) for s in F_SETUPS for a in (IG, FEDLEAK, OURS)]

# --- (e) the stage of the attack ------------------------------------------------------------------

E_SETUPS = [
    Setup(
        f"stage-{rounds}",
        f"After {rounds} rounds of training, batch 1",
        TWIN.format("quarter") + "CIFAR-10, Kaiming-normal fan-out, eval batch norm. Rounds of two "
        "of ten clients, 16 steps of 32 images, one federation for all runs. Paper: C2F, Fig. 9 "
        "and 10 show curves.",
        width=0.25,
        size=16,
        rounds=rounds,
    )
    for rounds in (0, 30)
]
E = [row(s, a, 300) for s in E_SETUPS for a in (IG, C2F, OURS)]

# --- (c) FedLeak, Table 3: large batches ----------------------------------------------------------

TABLE_3 = {16: (9.90, 10.26, 11.26, 23.06), 32: (9.51, 9.58, 10.59, 21.33),
           64: (8.52, 9.42, 10.01, 19.83)}  # fmt: skip
C_ATTACKS = ("idlg", IG, "gradinversion", FEDLEAK)
C_WORDS = (
    "CIFAR-10, Sigmoid and train batch norm as in FedLeak's released code, Kaiming-normal fan-out "
    "(the paper: ImageNet weights). Paper: FedLeak, Table 3, 10,000 iterations."
)
C_SETUPS = [
    Setup(
        f"large-{size}",
        f"Batch {size}, Sigmoid, train batch norm, twin",
        TWIN.format("quarter") + C_WORDS,
        width=0.25,
        size=16,
        batch=size,
        activation="sigmoid",
        batch_norm="train",
    )
    for size in TABLE_3
] + [
    Setup(
        f"fedleak-{size}",
        f"Batch {size}, Sigmoid, train batch norm, ResNet-10 at full size",
        C_WORDS,
        batch=size,
        activation="sigmoid",
        batch_norm="train",
    )
    for size in TABLE_3
]
LABELS = {"idlg": {"labels": "counts"}}  # its own rule is for one image
C = [
    row(s, a, 300 if s.size == 16 else 1000, paper=TABLE_3[s.batch][k], runs=1, here=s.size == 16,
        options=LABELS.get(a, {}))
    for s in C_SETUPS
    for k, a in enumerate(C_ATTACKS)
]  # fmt: skip
C += [
    row(s, OURS, 300, "generator", options=IN_GENERATOR, runs=1) for s in C_SETUPS if s.size == 16
]

# --- (i) exact recursion --------------------------------------------------------------------------

EXACT = "exact-recursion"
I_SETUPS = [
    Setup(
        f"exact-{size}",
        f"Exact recursion, ResNet-10, batch {size}",
        "CIFAR-10, 32 × 32, Kaiming-normal fan-out, one step, eval batch norm.",
        batch=size,
    )
    for size in (1, 16)
]
EXACTS = [
    Row(setup, EXACT, runs=runs, facts=("separated_at", "peeled_to", "images_met"))
    for setup, runs in (
        (C2F_SETUPS["normal"], 10),
        (I_SETUPS[0], 10),
        *((s, {4: 3, 8: 2}[s.batch]) for s in G_SETUPS if s.size == 32),
        (I_SETUPS[1], 1),
        (E_SETUPS[-1], 10),
    )
]

# --- what CI runs ---------------------------------------------------------------------------------

CI = Setup(
    "ci",
    "Small rows that CI runs",
    "Photographs that come with the packages, 16 × 16, ResNet-10 of a quarter width, batch 1, eval "
    "batch norm.",
    width=0.25,
    data="photos",
    size=16,
    cheap=True,
)
CHEAP = [Row(CI, attack, {"iterations": 150}, runs=2) for attack in (IG, C2F)]

SETUPS = [*C2F_SETUPS.values(), *G_SETUPS, *H_SETUPS, *D_SETUPS, *B_SETUPS.values(), *F_SETUPS,
          *E_SETUPS, *C_SETUPS, *I_SETUPS, CI]  # fmt: skip
ROWS = [*A, *G, *H, *D, *B, *F, *E, *C, *EXACTS, *CHEAP]
