"""Attacks by what they see: one file per paper. Names with an underscore are shared parts."""

from leakgauge.attacks._labels import RULES as LABEL_RULES
from leakgauge.attacks._separation import separable
from leakgauge.attacks.active import ACTIVE_ATTACKS
from leakgauge.attacks.agic import AGIC
from leakgauge.attacks.analytic import Analytic
from leakgauge.attacks.bayes import BayesAttack
from leakgauge.attacks.begun import Begun, begun
from leakgauge.attacks.ci_net import CINet
from leakgauge.attacks.coarse_to_fine import CoarseToFine
from leakgauge.attacks.curious_client import CuriousClient
from leakgauge.attacks.dlg import DLG
from leakgauge.attacks.exact_recursion import ExactRecursion
from leakgauge.attacks.exposure import Exposure, LayerExposure, exposure
from leakgauge.attacks.fedavg import FedAvgEpochs
from leakgauge.attacks.fedinverse import FedInverse
from leakgauge.attacks.fedleak import FedLeak
from leakgauge.attacks.ggl import GGL
from leakgauge.attacks.gias import GIAS
from leakgauge.attacks.git import GIT
from leakgauge.attacks.gradinversion import GradInversion
from leakgauge.attacks.guided_diffusion import GuidedDiffusion
from leakgauge.attacks.hfgradinv import HFGradInv
from leakgauge.attacks.idlg import IDLG
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.attacks.lti import LTI
from leakgauge.attacks.rog import ROG
from leakgauge.attacks.sapag import SAPAG
from leakgauge.attacks.separate_and_decode import SeparateAndDecode
from leakgauge.attacks.smooth_to_sharp import SmoothToSharp
from leakgauge.types import Attack

ATTACKS: dict[str, type[Attack]] = {
    "agic": AGIC,
    "analytic": Analytic,
    "bayes": BayesAttack,
    "ci-net": CINet,
    "coarse-to-fine": CoarseToFine,
    "curious-client": CuriousClient,
    "dlg": DLG,
    "exact-recursion": ExactRecursion,
    "fedavg-epochs": FedAvgEpochs,
    "fedinverse": FedInverse,
    "fedleak": FedLeak,
    "ggl": GGL,
    "gias": GIAS,
    "git": GIT,
    "gradinversion": GradInversion,
    "guided-diffusion": GuidedDiffusion,
    "hfgradinv": HFGradInv,
    "idlg": IDLG,
    "inverting-gradients": InvertingGradients,
    "lti": LTI,
    "rog": ROG,
    "sapag": SAPAG,
    "separate-and-decode": SeparateAndDecode,
    "smooth-to-sharp": SmoothToSharp,
}

__all__ = [
    "ACTIVE_ATTACKS",
    "AGIC",
    "ATTACKS",
    "DLG",
    "GGL",
    "GIAS",
    "GIT",
    "IDLG",
    "LABEL_RULES",
    "LTI",
    "ROG",
    "SAPAG",
    "Analytic",
    "BayesAttack",
    "Begun",
    "CINet",
    "CoarseToFine",
    "CuriousClient",
    "ExactRecursion",
    "Exposure",
    "FedAvgEpochs",
    "FedInverse",
    "FedLeak",
    "GradInversion",
    "GuidedDiffusion",
    "HFGradInv",
    "InvertingGradients",
    "LayerExposure",
    "SeparateAndDecode",
    "SmoothToSharp",
    "begun",
    "exposure",
    "separable",
]
