"""`lightrl report RUN_DIR ...`: plots and samples of a run, or of several runs, as one HTML page.

`read` gets the numbers from disk, `plots` draws them, `page` writes the HTML.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from lightrl.cli.report.read import Run, read_run, runs_below

__all__ = ["report"]

DRAWN = 6
"""Maximum number of runs that an index draws: the number of colors."""


def report(
    run_dir: Path | str,
    baseline: Path | str | None = None,
    out: Path | str | None = None,
    others: Sequence[Path | str] = (),
) -> Path:
    """Draw a run, or several on one page, and print its result, and the page's path as the last line.

    Args:
        run_dir: Folder of a run logged by Lightning's `CSVLogger`: it holds `metrics.csv`, or `version_*` folders that
            do, which are joined by step. `samples.jsonl` of `CompletionLogger` and `config.yaml` are used if present.
            Or a folder with several runs below it: the page is an index of them, the newest first, with links to their
            pages, and draws the six newest.
        baseline: Run folder of an evaluation before training (`lightrl validate` on the start model); its numbers are
            drawn at 0 rollouts and its samples are the "before" ones. Defaults to the run's first evaluation.
        out: Folder for `report.html` and the PNG files. Defaults to `run_dir/report`, or `comparison` for several runs.
        others: Further runs to draw with the first one; `lightrl report RUN RUN ...` is the same.

    Returns:
        Path of the page, a self-contained file. Hover over a plot to see values; drag to zoom, double-click to reset.

    Raises:
        ValueError: A run's folder has no `metrics.csv`, or nothing was logged to it.
    """
    root = Path(run_dir)
    below = runs_below(root) if baseline is None and not others else []
    several = [root, *map(Path, others)] if others else below if len(below) > 1 else []
    folder = Path(out) if out is not None else Path("comparison") if others else root / "report"
    page = folder / "report.html"
    if several:
        text = _several(several, [] if others else [root], folder)
    else:
        run = read_run(root, "run_dir")
        before = None if baseline is None else read_run(Path(baseline), "baseline")
        from lightrl.cli.report.header import result
        from lightrl.cli.report.page import render_page  # matplotlib, after the folders were checked
        from lightrl.cli.report.plots import draw_panels

        images = draw_panels(run, before)
        text = render_page(run, before, images)
        folder.mkdir(parents=True, exist_ok=True)
        for image in images:
            (folder / f"{image.name}.png").write_bytes(image.light)
        print(result(run, before))
    folder.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    print(page)
    return page


def _several(folders: Sequence[Path], root: list[Path], out: Path) -> str:
    """A page of the runs; those below a `root` may be broken, and are linked to their pages."""
    above = root[0].resolve() if root else Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    runs: list[Run] = []
    pages, notes = {}, []
    for folder in folders:
        name = os.path.relpath(folder.resolve(), above)
        try:
            runs.append(replace(read_run(folder, "run"), name=name))
        except ValueError as error:
            if not root:
                raise
            notes.append(f"Left out: {error}")
            print(notes[-1], file=sys.stderr)
        if root and (folder / "report" / "report.html").is_file():
            pages[name] = quote(Path(os.path.relpath(folder / "report" / "report.html", out)).as_posix())
    if not runs:
        raise ValueError(f"run_dir={str(root[0])!r}: none of {len(folders)} runs can be shown. {notes[0]}")
    if root and len(runs) > DRAWN:
        notes.append(f"Drawn are the newest {DRAWN}; `lightrl report RUN RUN ...` draws others.")
    from lightrl.cli.report.page import render_comparison
    from lightrl.cli.report.plots import draw_comparison

    return render_comparison(runs, draw_comparison(runs[:DRAWN] if root else runs), pages, notes)
