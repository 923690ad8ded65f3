"""What a defence computes of a local step besides its gradient."""

from __future__ import annotations

from torch import Tensor

from leakgauge.errors import InputError
from leakgauge.fl.local import loss
from leakgauge.types import Here, Local, Named


def local_step(here: Here, defence: str) -> Local:
    """What the step is computed from."""
    if here.local is None:
        raise InputError(
            f"the defence {defence!r} needs the records and the weights of the local step: call it "
            "from local training (leakgauge.fl.local.train), or give Here its `local`"
        )
    return here.local


def copied(local: Local) -> Named:
    """Its parameters and buffers: a forward pass in train mode changes the buffers it is given."""
    return {name: value.clone() for name, value in local.values.items()}


def loss_at(here: Here, local: Local, values: Named, inputs: Tensor) -> Tensor:
    """The loss of the step's labels with other parameters or other records."""
    return loss(local.setting, values, inputs, local.batch.labels, local.training, here.step)
