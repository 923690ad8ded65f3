"""A classifier of the user's own. Nothing in it knows of LeakGauge."""

from torch import Tensor, nn


class SmallNet(nn.Module):
    """Three convolutions, two of them strided, and a linear head."""

    def __init__(self, channels: int, side: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64 * (side // 4) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


def make_model(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The model for images of `shape` (channels, height, width), side a multiple of four."""
    channels, side, _ = shape
    return SmallNet(channels, side, classes)
