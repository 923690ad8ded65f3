"""What a client does to the update before it leaves: one file per method."""

from leakgauge.defences.adaptive_clip import AdaptiveClip
from leakgauge.defences.censor import Censor
from leakgauge.defences.chain import Chain
from leakgauge.defences.clip import Clip
from leakgauge.defences.clip_and_noise import ClipAndNoise
from leakgauge.defences.decaying_noise import DecayingNoise
from leakgauge.defences.dp_sgd import DpSgd
from leakgauge.defences.guardian import Guardian
from leakgauge.defences.hide_top import HideTop
from leakgauge.defences.low_rank import LowRank
from leakgauge.defences.outpost import Outpost
from leakgauge.defences.paired_noise import PairedNoise
from leakgauge.defences.prune import Prune
from leakgauge.defences.quantise import Quantise
from leakgauge.defences.sign import Sign
from leakgauge.defences.soteria import Soteria
from leakgauge.defences.top_k import TopK
from leakgauge.types import Defence

DEFENCES: dict[str, type[Defence]] = {
    "clip": Clip,
    "clip-and-noise": ClipAndNoise,
    "decaying-noise": DecayingNoise,
    "dp-sgd": DpSgd,
    "adaptive-clip": AdaptiveClip,
    "prune": Prune,
    "top-k": TopK,
    "sign": Sign,
    "quantise": Quantise,
    "low-rank": LowRank,
    "soteria": Soteria,
    "outpost": Outpost,
    "guardian": Guardian,
    "censor": Censor,
    "hide-top": HideTop,
    "paired-noise": PairedNoise,
}

__all__ = [
    "DEFENCES",
    "AdaptiveClip",
    "Censor",
    "Chain",
    "Clip",
    "ClipAndNoise",
    "DecayingNoise",
    "DpSgd",
    "Guardian",
    "HideTop",
    "LowRank",
    "Outpost",
    "PairedNoise",
    "Prune",
    "Quantise",
    "Sign",
    "Soteria",
    "TopK",
]
