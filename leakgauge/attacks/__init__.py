"""Attacks by what they see: one file a paper. Names with a leading underscore are shared parts."""

from leakgauge.attacks._labels import RULES as LABEL_RULES
from leakgauge.attacks.analytic import Analytic
from leakgauge.attacks.dlg import DLG
from leakgauge.attacks.idlg import IDLG
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.types import Attack

ATTACKS: dict[str, type[Attack]] = {
    "analytic": Analytic,
    "dlg": DLG,
    "idlg": IDLG,
    "inverting-gradients": InvertingGradients,
}

__all__ = ["ATTACKS", "DLG", "IDLG", "LABEL_RULES", "Analytic", "InvertingGradients"]
