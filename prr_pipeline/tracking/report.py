# SPDX-License-Identifier: Apache-2.0
"""Finished jobs -> one table, or a W&B report to review: their tables as text, and panels over their runs.

    python -m prr_pipeline.tracking.report runs/smollm2_quest/* --table
    python -m prr_pipeline.tracking.report runs/speed/* --paper
    python -m prr_pipeline.tracking.report runs/smollm2_quest/<hash> [more jobs ...] --entity ME

--table prints one Markdown table over all jobs, as of a sweep, and what differs between them; --paper the paper's
tables, a line a model and method, synthetic queries a column a context. Nothing is sent. For a
report the runs must have been uploaded (`wandb sync`, or tracker.mode=online). Its tables come from the jobs' own
files, so that it says what they say. --dry-run needs no login. Needs the extra `reports` (wandb-workspaces). A job that
is not finished is named on stderr and left out.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prr_pipeline.artifacts import StageFolder, redo
from prr_pipeline.errors import ArtifactError, MissingInput, PrrError, one_line
from prr_pipeline.tracking import tables
from prr_pipeline.tracking.beside import paper_tables
from prr_pipeline.tracking.tracker import has_key

_METRICS = ("score", "ms_per_token")
_ROW = {"model", "dsa", "benchmark", "task", "mode"}  # what tables name a row by
_REDO = redo("evaluate")
_NAME = ".name"  # how the key of an option's name ends
_IN_TABLE = ("experiment", *(f"{group}{_NAME}" for group in ("model", "dsa", "benchmark")))  # or in the job's label
_TOLD = ("benchmark.length",)  # also of different options: no name says how long the contexts are

Leaves = dict[str, Any]


def load_job(folder: Path) -> dict[str, Any]:
    """What a report shows of a job: its configuration, rows and Markdown tables.

    A job is finished if evaluate's files are those that it wrote, and were made of what the stages before it hold now.
    Of which source it was made does not matter here.

    Raises:
        MissingInput: the folder is no job, or not finished, or damaged; says what to do.
    """
    for name in ("config.json", "evaluate/manifest.json", "evaluate/results.json"):
        if not (folder / name).is_file():
            raise MissingInput(f"{folder}: no {name}; expected runs/<experiment>/<hash>, stage evaluate finished")
    try:
        config = _object(folder / "config.json", ("experiment",))
        _check_current(folder, config)
        rows = _rows(folder / "evaluate" / "results.json")
        texts = [folder / "evaluate" / name for name in ("results.md", "paper.md")]
        read = [p.read_text(encoding="utf-8") for p in texts if p.is_file()]
    except (ArtifactError, OSError) as error:
        raise MissingInput(f"{folder}: {error}") from None
    group = f"{config['experiment']}-{folder.name}"
    return {"folder": folder, "group": group, "config": config, "rows": rows, "tables": read}


def stage_folder(folder: Path, stage: str, config: dict[str, Any]) -> StageFolder:
    """A stage of a job that is looked at only."""
    return StageFolder(folder / stage, stage, config)


def _check_current(folder: Path, config: dict[str, Any]) -> None:
    """Raise ArtifactError if evaluate's files are not what it wrote, or were made of other outputs than there are."""
    of = partial(stage_folder, folder, config=config)
    manifest = of("evaluate").require("report")
    if "results.json" not in manifest["outputs"] or "decode" not in manifest["inputs"]:
        raise ArtifactError(f"{of('evaluate').manifest} is damaged (results.json or decode is not in it); {_REDO}")
    of("decode").require("evaluate")
    if others := of("evaluate").outdated(manifest, of):
        raise ArtifactError(
            f"evaluate was made of other outputs than there are now; these differ: {', '.join(others)}; redo it: "
            "stages=[decode,evaluate]"
        )


def _object(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """A JSON file that holds an object with these keys; raises ArtifactError if it does not."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in keys if not isinstance(found, dict) or key not in found]
        why = f"no {', '.join(missing)} in it" if missing else None
    except ValueError as error:  # not UTF-8, no JSON
        why = str(error)
    if why:
        raise ArtifactError(f"{path} is damaged ({why}); {_REDO}")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results; raises ArtifactError if it has none."""
    rows = _object(path, ("rows",))["rows"]
    if not (isinstance(rows, list) and rows and all(isinstance(r, dict) and r.keys() >= _ROW for r in rows)):
        raise ArtifactError(f"{path} is damaged (no rows with {', '.join(sorted(_ROW))}); {_REDO}")
    return rows


def load_finished(folders: Sequence[Path], program: str = "report") -> list[dict[str, Any]]:
    """Jobs whose evaluate is finished; the others are named on stderr, as a pattern over a sweep finds them too.

    Raises:
        MissingInput: none is finished.
    """
    jobs, others = [], []
    for folder in folders:
        try:
            jobs.append(load_job(folder))
        except MissingInput as error:
            others.append(error)
    if not jobs:
        raise MissingInput("\n".join(map(str, others)))
    for other in others:
        print(f"{program}: left out: {other}", file=sys.stderr)
    return jobs


def joint(jobs: Sequence[dict[str, Any]]) -> str:
    """One table over all jobs, after a list of them with the options in which they differ; both ordered by these."""
    options = [_leaves(job["config"]) for job in jobs]
    named = [key for key in _differing(options, {}) if key.endswith(_NAME)]
    told = [*named, *_differing(options, {key.removesuffix(_NAME): key for key in named})]

    def order(one: tuple[dict[str, Any], Leaves]) -> tuple[Any, ...]:
        return tables.pair_label(one[0]["rows"][0]), [_rank(one[1].get(key)) for key in told]

    ordered = sorted(zip(jobs, options, strict=True), key=order)
    lines = [f"- job {n}: {_line(job, own, told)}" for n, (job, own) in enumerate(ordered, 1)]
    table = tables.joint({str(n): job["rows"] for n, (job, _) in enumerate(ordered, 1)})
    return "\n".join(lines) + f"\n\n{table}"


def _differing(options: Sequence[Leaves], named: Mapping[str, str]) -> list[str]:
    """Keys whose values differ between jobs.

    Args:
        options: of each job.
        named: groups of which the jobs took several options, each with the key of the option's name. A key of theirs
            counts if jobs of one and the same option differ in it; else the name says it.
    """

    def differs(key: str) -> bool:
        name = "" if key in _TOLD else named.get(key.split(".")[0], "")
        values: dict[Any, set[str]] = {}
        for own in options:
            values.setdefault(own.get(name), set()).add(json.dumps(own.get(key)))
        return max(map(len, values.values())) > 1

    return [key for key in dict.fromkeys(k for own in options for k in own) if differs(key)]


def _line(job: dict[str, Any], own: Leaves, told: Sequence[str]) -> str:
    """A job's group, model and method, and what tells it from others; names that the table has too are left out."""
    shown = {key.removesuffix(_NAME): own.get(key) for key in told if key not in _IN_TABLE}
    what = [f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in shown.items() if v is not None]
    return ", ".join([f"{job['group']}: {tables.pair_label(job['rows'][0])}", *what])


def _rank(value: Any) -> tuple[int, float, str]:
    """Where a value comes among others: none first, then numbers as such, then texts."""
    if isinstance(value, int | float):
        return 1, value, ""
    return (0, 0, "") if value is None else (2, 0, str(value))


def beside_paper(jobs: Sequence[dict[str, Any]]) -> str:
    """The paper's tables over all jobs; what synthetic queries were timed at is a benchmark of its own a context."""
    renamed = []
    for job in jobs:
        at = job["config"].get("benchmark", {}).get("length")
        named = [f"{r['benchmark']} at {at}" if tables.synthetic(r) and at else r["benchmark"] for r in job["rows"]]
        renamed.append([{**row, "benchmark": name} for row, name in zip(job["rows"], named, strict=True)])
    return paper_tables(*renamed)


def _leaves(config: Any, at: str = "") -> Leaves:
    """Values of a nested configuration, by their paths."""
    if not isinstance(config, dict):
        return {at: config}
    return {k: v for key, value in config.items() for k, v in _leaves(value, f"{at}.{key}" if at else key).items()}


def build(jobs: Sequence[dict[str, Any]], project: str, entity: str, title: str) -> Any:
    """The report, a section a job, unsaved (wandb_workspaces.reports.v2.Report).

    Raises:
        MissingInput: the extra is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as error:
        raise MissingInput(f"W&B reports need wandb-workspaces ({error}). Run: pip install wandb-workspaces") from None
    blocks: list[Any] = [wr.TableOfContents()]
    for job in jobs:
        config = job["config"]
        text = f"seed {config['seed']}, repair {config['runtime']['repair']}, budget {config['budget']['name']}"
        blocks += [wr.H1(job["group"]), wr.P(text), *(wr.MarkdownBlock(t) for t in job["tables"])]
        runs = wr.Runset(
            entity=entity,
            project=project,
            name=job["group"],
            filters=f"Metric('Group') == '{job['group']}' and Metric('JobType') == 'evaluate'",
        )
        blocks.append(wr.PanelGrid(runsets=[runs], panels=_panels(wr, job["rows"])))
    return wr.Report(project=project, entity=entity, title=title, blocks=blocks)


def _panels(wr: Any, rows: list[dict[str, Any]]) -> list[Any]:
    """A bar chart a task and metric, and the plots."""
    panels = []
    for task in dict.fromkeys(r["task"] for r in rows):
        modes = [r["mode"] for r in rows if r["task"] == task]
        for metric in _METRICS:
            keys = [wr.SummaryMetric(f"{task}/{mode}/{metric}") for mode in modes]
            panels.append(wr.BarPlot(title=f"{task}: {metric}", metrics=keys))
    return [*panels, wr.MediaBrowser(media_keys=["breakdown", "overlap", "hit_rate", "layers", "latency", "layer"])]


def sections(blocks: Sequence[Any]) -> list[str]:
    """What a report's blocks hold, a line each: headings as they are, columns of tables, titles of panels.

    Args:
        blocks: of `build`'s report.
    """
    return [line for block in blocks for line in _section(block)]


def _section(block: Any) -> list[str]:
    kind = type(block).__name__
    if kind == "H1":
        return ["", f"# {block.text}"]
    if kind == "P":
        return [f"  {block.text}"]
    if kind == "MarkdownBlock":
        return _outline(block.text)
    if kind == "PanelGrid":
        plots = [key for panel in block.panels for key in getattr(panel, "media_keys", ())]
        charts = [title for panel in block.panels if (title := getattr(panel, "title", None))]
        return [*(f"  bar chart: {title}" for title in charts), f"  plots that there are of: {', '.join(plots)}"]
    return ["  table of contents"] if kind == "TableOfContents" else [f"  {kind}"]


def _outline(markdown: str) -> list[str]:
    """Headings, and a table's columns, of a text of `evaluate`."""
    lines = markdown.splitlines()
    found = [f"  {line}" if line.startswith("#") else "" for line in lines]
    for i, line in enumerate(lines[1:]):
        if line.startswith("| ---"):
            found[i] = f"  table: {lines[i].strip('| ')}"
    return [line for line in found if line] or ["  text"]


def _save(report: Any) -> None:
    """Send a report; raises MissingInput for whatever W&B refuses, a login that is not there first of all."""
    without = "Without W&B, --table prints the jobs' tables and --dry-run lists the report's sections"
    if not has_key():
        raise MissingInput(f"no W&B login, which a report needs: run `wandb login`. {without}")
    try:
        report.save()
    except Exception as error:  # no network, a key that is not valid, another's project: each of a class of its own
        raise MissingInput(
            f"W&B did not take the report ({one_line(error)}): look at --entity and the network, or run "
            f"`wandb login --relogin`. {without}"
        ) from None


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m prr_pipeline.tracking.report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("jobs", nargs="+", type=Path, help="folders runs/<experiment>/<hash> with a finished evaluate")
    parser.add_argument("--table", action="store_true", help="print one table over the jobs; no W&B")
    parser.add_argument("--paper", action="store_true", help="print the paper's tables over the jobs; no W&B")
    parser.add_argument("--project", default="prr_pipeline")
    parser.add_argument("--entity", default="", help="W&B user or team; yours when left out")
    parser.add_argument("--title", default="Predict-Reuse-Repair")
    parser.add_argument(
        "--dry-run", action="store_true", help="build it and list its sections; no login, nothing is sent"
    )
    args = parser.parse_args(argv)
    try:
        jobs = load_finished(args.jobs)
        if args.table or args.paper:
            print("\n\n".join(made(jobs) for made, asked in ((joint, args.table), (beside_paper, args.paper)) if asked))
            return 0
        report = build(jobs, args.project, args.entity, args.title)
        if args.dry_run:
            print("\n".join([f"report: {report.title}", *sections(report.blocks)]))
        else:
            _save(report)
            print(report.url)
    except PrrError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
