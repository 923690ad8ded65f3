"""Reports of an audit: pure functions of its result and of the pictures in its folder.

`first_screen` and `contents` hold the words and numbers, `html`, `markdown` and `pdf` give them a
form, `diff` compares two results. `protocol` reports a protocol.
"""

from __future__ import annotations

from pathlib import Path

from leakgauge.audit import schema
from leakgauge.files import write_atomic
from leakgauge.report import diff, html, markdown, pdf, protocol
from leakgauge.report.contents import Images

__all__ = ["Images", "diff", "html", "markdown", "pdf", "protocol", "write"]


def write(folder: Path, images: Images = "blur", *, with_pdf: bool = False) -> list[Path]:
    """Write the reports of the audit in this folder beside its result.json; their paths."""
    result = schema.load(folder / "result.json")
    contents = {
        "report.html": html.render(result, folder, images).encode(),
        "report.md": markdown.render(result, folder).encode(),
    }
    if with_pdf:
        contents["report.pdf"] = pdf.render(result, folder, images)
    for name, content in contents.items():
        write_atomic(folder / name, content)
    return [folder / name for name in contents]
