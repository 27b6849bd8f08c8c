"""`lightrl report RUN_DIR ...`: plots and sample completions of one or several runs as an HTML page.

`read` loads the metrics, `plots` draws them, and `page` writes the HTML.
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
"""Maximum number of runs in the plots of an index page: the number of colors."""


def report(
    run_dir: Path | str,
    baseline: Path | str | None = None,
    out: Path | str | None = None,
    others: Sequence[Path | str] = (),
) -> Path:
    """Plot one or several runs on an HTML page. Prints the run's result, and the path of the page as the last line.

    Args:
        run_dir: Run directory with a `metrics.csv` of Lightning's `CSVLogger`, or with `version_*` directories, which
            are merged by step. `samples.jsonl` of `CompletionLogger` and `config.yaml` are used if present. Pass a
            directory that contains several runs to write an index of them. It links to their pages and plots the six
            newest runs.
        baseline: Run directory of an evaluation before training (`lightrl validate` with the initial model). Its
            metrics are plotted at 0 rollouts and its completions are shown as "before". Defaults to the run's first
            evaluation.
        out: Directory for `report.html` and the PNG files. Defaults to `run_dir/report`, or `comparison` for several
            runs.
        others: Additional runs to compare with the first, as in `lightrl report RUN RUN ...`.

    Returns:
        Path of the page, a self-contained file. Hover over a plot to see values; drag to zoom, double-click to reset.

    Raises:
        ValueError: A run directory has no `metrics.csv`, or the file has no metrics yet.
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
        from lightrl.cli.report.page import render_page  # imports matplotlib, so after the checks
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
    """Renders a page of several runs. Runs below a `root` link to their pages and are skipped if unreadable."""
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
            notes.append(f"Skipped: {error}")
            print(notes[-1], file=sys.stderr)
        if root and (folder / "report" / "report.html").is_file():
            pages[name] = quote(Path(os.path.relpath(folder / "report" / "report.html", out)).as_posix())
    if not runs:
        raise ValueError(f"run_dir={str(root[0])!r}: none of its {len(folders)} runs can be read. {notes[0]}")
    if root and len(runs) > DRAWN:
        notes.append(f"The plots show the {DRAWN} newest runs. To plot others, run `lightrl report RUN RUN ...`.")
    from lightrl.cli.report.page import render_comparison
    from lightrl.cli.report.plots import draw_comparison

    return render_comparison(runs, draw_comparison(runs[:DRAWN] if root else runs), pages, notes)
