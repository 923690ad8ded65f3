"""Makes the folder `images/` beside this file: one sub-folder per class, PNG files in it.

The pictures are crops of the photographs inside the installed scikit-image, so nothing is
downloaded. With records of your own, skip this file and point `data.folder` of the plan at them.
"""

from pathlib import Path

from PIL import Image

import leakgauge as lg

FOLDER = Path(__file__).parent / "images"

photos = lg.data.load("photos", size=64, per_photo=12)
for number, (image, label) in enumerate(zip(photos.inputs, photos.labels, strict=True)):
    folder = FOLDER / photos.classes[label]
    folder.mkdir(parents=True, exist_ok=True)
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(folder / f"{number:03}.png")
print(f"{len(photos)} images in {FOLDER}")
