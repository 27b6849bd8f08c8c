"""`lightrl report RUN_DIR ...`: plots and samples of a run, or of several runs, as one HTML page.

`read` gets the numbers off the disk, `plots` draws them, `page` writes the HTML.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from lightrl.checkpoints.files import atomic_write
from lightrl.cli.report.read import Run, inside, read_run, runs_below

__all__ = ["report"]

DRAWN = 6
"""Most runs whose lines an index draws: as many as there are colours."""


def report(
    run_dir: Path | str,
    baseline: Path | str | None = None,
    out: Path | str | None = None,
    others: Sequence[Path | str] = (),
) -> Path:
    """Draws a run, or several in one page, and prints the path of the page as the last line.

    Args:
        run_dir: folder of a run logged by Lightning's `CSVLogger`: it holds `metrics.csv`, or `version_*` folders that
            do. Folders of a run that was interrupted and resumed are joined by step; where a later folder starts again
            from an earlier step, it replaces what came after that step. `samples.jsonl` of `CompletionLogger` and
            `config.yaml` are used where they are there. Or a folder with several runs below it: the page is an index of
            them, the newest first, with links to the pages of their own that were made, and the six newest drawn.
        baseline: run folder of an evaluation before training (`lightrl validate` on the start model); its numbers are
            drawn at 0 rollouts and its samples are the "before" ones. Without it the run's first evaluation is, which
            is one before training with the `EvaluateFirst` callback.
        out: folder to write `report.html` and the PNG files to; `run_dir/report` where None, or `comparison` here
            where there are several runs.
        others: further runs, whose lines are drawn beside the first one's; `lightrl report RUN RUN ...` is the same.

    Returns:
        the path of the page: one file that needs no other, for a wide screen or a phone, light or dark. Over a
        plot it shows the values under the mouse; dragging over rollouts draws these alone, a double click all again.
        Records and numbers that cannot be read are left out, which the page and stderr say.

    Raises:
        ValueError: there is no `metrics.csv` in a run's folder, or nothing was logged to it; one is given twice, or a
            baseline with several runs; `run_dir/report` is a link out of the run.
    """
    if others:
        return _compare([Path(run_dir), *map(Path, others)], baseline, Path("comparison") if out is None else Path(out))
    below = runs_below(Path(run_dir)) if baseline is None else []
    if len(below) > 1:
        return _index(Path(run_dir), below, _folder_of_page(Path(run_dir), out))
    run = read_run(Path(run_dir), "run_dir")
    before = None if baseline is None else read_run(Path(baseline), "baseline")
    folder = _folder_of_page(Path(run_dir), out)
    from lightrl.cli.report.page import render_page  # matplotlib, which a wrong folder need not wait for
    from lightrl.cli.report.plots import draw_panels

    _tell([run] if before is None else [run, before])
    images = draw_panels(run, before)
    for image in images:
        with atomic_write(folder / f"{image.name}.png") as file:
            file.write(image.light)
    page = folder / "report.html"
    with atomic_write(page, "w") as file:
        file.write(render_page(run, before, images))
    print(page)
    return page


def _folder_of_page(run_dir: Path, out: Path | str | None) -> Path:
    """Where to write: what the user gave, or `report` in the run, which may not lead out of it."""
    if out is not None:
        return Path(out)
    folder = run_dir / "report"
    if not inside(folder, run_dir):
        raise ValueError(
            f"{folder} is a link to {os.path.realpath(folder)}, outside of run_dir={str(run_dir)!r}: only files of the "
            "run are written. Remove it, or give --out."
        )
    return folder


def _tell(runs: Sequence[Run]) -> None:
    """Says on stderr what is not on the page."""
    for line in (line for run in runs for line in run.left_out):
        print(f"Left out: {line}", file=sys.stderr)


def _index(root: Path, folders: Sequence[Path], out: Path) -> Path:
    runs, pages, notes = [], {}, []
    for folder in folders:
        name = folder.relative_to(root).as_posix()
        try:
            runs.append(replace(read_run(folder, "run"), name=name))
        except (ValueError, OSError) as error:  # one that has just begun, or is broken, hides no other
            notes.append(f"Left out: {error}")
            continue
        own = folder / "report" / "report.html"
        if own.is_file():
            pages[name] = quote(Path(os.path.relpath(own, out)).as_posix())
    if not runs:
        raise ValueError(f"run_dir={str(root)!r}: none of {len(folders)} runs can be shown. {notes[0]}")
    if len(runs) > DRAWN:
        notes.append(f"Drawn are the newest {DRAWN}; `lightrl report RUN RUN ...` draws others.")
    return _write(runs, runs[:DRAWN], out, pages, notes)


def _compare(folders: Sequence[Path], baseline: Path | str | None, out: Path) -> Path:
    if baseline is not None:
        raise ValueError(f"baseline={str(baseline)!r} with {len(folders)} runs: give it among them, or one run only.")
    places = [folder.resolve() for folder in folders]
    twice = sorted({str(folder) for folder, place in zip(folders, places, strict=True) if places.count(place) > 1})
    if twice:
        raise ValueError(f"run {', '.join(twice)} is given twice.")
    above = os.path.commonpath([place.parent for place in places])
    runs = [
        replace(read_run(folder, "run"), name=os.path.relpath(place, above))
        for folder, place in zip(folders, places, strict=True)
    ]
    return _write(runs, runs, out)


def _write(
    runs: Sequence[Run],
    drawn: Sequence[Run],
    out: Path,
    pages: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    from lightrl.cli.report.page import render_comparison
    from lightrl.cli.report.plots import draw_comparison

    _tell(runs)
    page = out / "report.html"
    with atomic_write(page, "w") as file:
        file.write(render_comparison(runs, draw_comparison(drawn), pages, notes))
    print(page)
    return page
