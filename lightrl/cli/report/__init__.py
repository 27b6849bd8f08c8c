"""`lightrl report RUN_DIR`: plots and sample completions of a run as an HTML page.

`read` loads the metrics, `plots` draws them, and `page` writes the HTML.
"""

from __future__ import annotations

from pathlib import Path

from lightrl.checkpoints.files import atomic_write
from lightrl.cli.report.read import read_run

__all__ = ["report"]


def report(run_dir: Path | str, out: Path | str | None = None) -> Path:
    """Plot a run on an HTML page. Prints the run's result, and the path of the page as the last line.

    Args:
        run_dir: Run directory with a `metrics.csv` of Lightning's `CSVLogger`. `samples.jsonl` of `CompletionLogger`
            and `hparams.yaml` are used if present.
        out: Directory for `report.html` and the PNG files. Defaults to `run_dir/report`.

    Returns:
        Path of the page, a self-contained file. Hover over a plot to see values.

    Raises:
        ValueError: The run directory has no `metrics.csv`, or the file has no metrics yet.
    """
    run = read_run(Path(run_dir))
    from lightrl.cli.report.header import result
    from lightrl.cli.report.page import render_page  # imports matplotlib, so after the checks
    from lightrl.cli.report.plots import draw_panels

    images = draw_panels(run)
    page = Path(out or Path(run_dir) / "report") / "report.html"
    for image in images:
        with atomic_write(page.parent / f"{image.name}.png") as file:
            file.write(image.png)
    with atomic_write(page, "w") as file:
        file.write(render_page(run, images))
    print(result(run))
    print(page)
    return page
