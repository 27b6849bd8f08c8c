"""`lightrl report RUN_DIR ...`: plots and sample completions of one or several runs as an HTML page.

`read` loads the metrics, `plots` draws them, and `page` writes the HTML.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightrl.cli.report.read import read_run

__all__ = ["report"]


def report(
    run_dir: Path | str,
    baseline: Path | str | None = None,
    out: Path | str | None = None,
    others: Sequence[Path | str] = (),
) -> Path:
    """Plot one or several runs on an HTML page. Prints the run's result, and the path of the page as the last line.

    Args:
        run_dir: Run directory with a `metrics.csv` of Lightning's `CSVLogger`, or with `version_*` directories, which
            are merged by step. `samples.jsonl` of `CompletionLogger` and `hparams.yaml` are used if present.
        baseline: Run directory of an evaluation before training (`lightrl validate` with the initial model). Its
            metrics are plotted at 0 rollouts and its completions are shown as "before". Defaults to the run's first
            evaluation.
        out: Directory for `report.html` and the PNG files. Defaults to `run_dir/report`, or `comparison` for several
            runs.
        others: Additional runs to compare with the first, as in `lightrl report RUN RUN ...`.

    Returns:
        Path of the page, a self-contained file. Hover over a plot to see values.

    Raises:
        ValueError: A run directory has no `metrics.csv`, or the file has no metrics yet.
    """
    folders = [Path(run_dir), *map(Path, others)]
    runs = [read_run(folder, "run_dir") for folder in folders]
    before = None if baseline is None else read_run(Path(baseline), "baseline")
    from lightrl.cli.report.header import result
    from lightrl.cli.report.page import render_comparison, render_page  # imports matplotlib, so after the checks
    from lightrl.cli.report.plots import draw_comparison, draw_panels

    if others:
        above = os.path.commonpath([folder.resolve().parent for folder in folders])
        names = [os.path.relpath(folder.resolve(), above) for folder in folders]
        runs = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
        images = draw_comparison(runs)
        text = render_comparison(runs, images)
    else:
        images = draw_panels(runs[0], before)
        text = render_page(runs[0], before, images)
        print(result(runs[0], before))
    page = (Path(out) if out else Path("comparison") if others else folders[0] / "report") / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    for image in images:
        (page.parent / f"{image.name}.png").write_bytes(image.png)
    page.write_text(text, encoding="utf-8")
    print(page)
    return page
