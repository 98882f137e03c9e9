# SPDX-License-Identifier: Apache-2.0
"""python -m cutlass_kernels.bench: times every op in CUDA graphs, beside its floor and its peers, in one process.

A time is the median of graph replays, divided by the calls in the graph; consecutive calls use different inputs, more
of them than the second level cache holds. `floor_us` is the bytes that must come from memory over 4.44 TB/s.
"""

import argparse
import datetime
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutlass_kernels.bench_cases import Case

log = logging.getLogger("cutlass_kernels.bench")
PEERS = ("flashinfer", "torch")
OPS = (
    *("serial_attention", "attend", "merge", "repair", "append", "append_quest", "append_infllm"),
    *("quest_scores", "infllm_scores", "rank_infllm", "select", "predict", "layer_serial", "layer_prr"),
    *("linear", "add_rms_norm", "norm_linear", "silu_linear", "calibrate"),
)


def parse(args: list[str] | None = None) -> argparse.Namespace:
    """The command line; needs neither torch nor a GPU."""
    p = argparse.ArgumentParser("python -m cutlass_kernels.bench", description=__doc__.split("\n\n")[0])
    p.add_argument("--ops", nargs="+", choices=OPS, default=OPS, metavar="OP", help=f"of: {', '.join(OPS)}")
    p.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="PEER", help="of: flashinfer, torch")
    p.add_argument("--block", type=int, nargs="+", help="only these block sizes")
    p.add_argument("--replays", type=int, default=25, help="graph replays a time is the median of (default 25)")
    p.add_argument("--refcheck", action="store_true", help="compare with the reference before timing")
    p.add_argument("--out", type=Path, help="write the rows there as JSON (default: print only)")
    p.add_argument("--keep", action="store_true", help="leave the rows of --out that this run does not measure in it")
    p.add_argument("--commit", help="recorded in the file (default: what git says)")
    p.add_argument("--list", action="store_true", help="list the shapes and stop; needs no GPU")
    found = p.parse_args(args)
    if found.keep and not found.out:
        p.error("--keep leaves rows in a file: name it with --out")
    return found


def graph_time(call: Callable[[int], object], sets: int, replays: int = 25) -> float:
    """Median microseconds of a call inside a CUDA graph of at least 16 of them, on each set of buffers in turn."""
    from cutlass_kernels.graph import replay_us

    n = sets * max(1, -(-16 // sets))

    def body() -> None:
        for i in range(n):
            call(i)

    return replay_us(body, replays) / n


def _git(*args: str) -> str:
    try:
        folder = Path(__file__).parent
        done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def envelope(
    rows: list[dict], commit: str | None = None, name: str = "kernels", program: str = "cutlass_kernels.bench"
) -> dict:
    """The published form: what was run, where, and when.

    Raises:
        RuntimeError: no CUDA device to name.
    """
    import importlib.metadata

    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device, and the file names the GPU and the driver of its numbers")
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "name": name,
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cutlass": importlib.metadata.version("nvidia-cutlass-dsl"),
        "commit": commit or _git("rev-parse", "HEAD"),
        "command": command(program, sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": rows,
    }


def command(program: str, args: list[str]) -> str:
    """A command as another machine can run it: without the commit, and without the folders of absolute paths."""
    split = [part for word in args for part in (word.split("=", 1) if word.startswith("--") else [word])]
    words = [Path(word).name if word.startswith("/") else word for word in split]
    at = words.index("--commit") if "--commit" in words else len(words)
    return " ".join(["python -m", program, *words[:at], *words[at + 2 :]])


def measure(case: "Case", args: argparse.Namespace) -> dict:
    """One row, without its peers."""
    import torch

    from cutlass_kernels import bench_cases

    row = case.row()
    call, check = bench_cases.calls(case)
    if args.refcheck:
        check()
    row["us"] = round(graph_time(call, bench_cases.set_count(case), args.replays), 2)
    if case.floor_bytes():
        row["floor_us"] = round(case.floor_bytes() / bench_cases.BYTES_PER_US, 2)
    del call, check
    torch.cuda.empty_cache()
    return row


def measure_peers(case: "Case", args: argparse.Namespace, missing: set[str]) -> dict:
    """The <peer>_us keys of a row; a peer that is not installed is said once, and left out."""
    import torch

    from cutlass_kernels import bench_cases, peers

    found: dict[str, float] = {}
    timer = lambda fn, sets: graph_time(fn, sets, args.replays)
    for peer in bench_cases.peers_of(case):
        if peer not in args.peers or peer in missing:
            continue
        try:
            found.update({k: round(v, 2) for k, v in peers.PEERS[peer](case, timer).items()})
        except ImportError as error:
            missing.add(peer)
            log.warning("%s is left out: %s (pip install 'prr-pipeline[peers]')", peer, error)
        torch.cuda.empty_cache()
    return found


def joined(head: dict, before: dict) -> dict:
    """An envelope with the rows of one before it that it has no new ones of; those say the commit that they are of."""

    def case(row: dict) -> dict:
        return {k: v for k, v in row.items() if k != "commit" and not k.endswith("us")}

    rows = list(head["rows"])
    found = []
    for old in before["rows"]:
        new = next((row for row in rows if case(row) == case(old)), None)
        if new is not None:
            rows.remove(new)
        found.append({"commit": before["commit"], **old} if new is None else new)
    return {**head, "command": f"{before['command']}; {head['command']}", "rows": found + rows}


def kept(path: Path, gpu: str) -> dict:
    """The envelope whose rows are kept.

    Raises:
        ValueError: the file is not there, or another one, or of another GPU.
    """
    from cutlass_kernels import report

    before = report.published(path, {"op"})
    if before["gpu"] != gpu:
        raise ValueError(f"what is there was measured on {before['gpu']}, this on {gpu}")
    return before


def write(path: Path, head: dict) -> None:
    """An envelope, atomically, so that an interrupted run leaves the last complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".tmp")
    head = dict(head)
    lines = ",\n".join("  " + json.dumps(row) for row in head.pop("rows"))
    new.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
    os.replace(new, path)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    args = parse(argv)
    from cutlass_kernels import bench_cases

    chosen = [c for c in bench_cases.cases() if c.op in args.ops and (not args.block or c.block in args.block)]
    if args.list:
        print("\n".join(_listed(case, args.peers) for case in chosen))
        return 0
    import torch

    if not torch.cuda.is_available():
        log.error("no CUDA device: the benchmark times GPU kernels; --list shows what it would time")
        return 2
    try:
        before = kept(args.out, torch.cuda.get_device_name()) if args.keep else None
    except ValueError as error:
        log.error("--keep: %s", error)
        return 2
    done: list[tuple[bench_cases.Case, dict]] = []
    failed = 0
    for case in chosen:
        try:
            done.append((case, measure(case, args)))
        except (NotImplementedError, AssertionError) as error:
            failed += 1
            log.error("%s: %s", _words(case.row()), error)
            continue
        log.info("%s", _words(done[-1][1]))
        _save(args, done, before)
    missing: set[str] = set()
    for case, row in done:  # after our own rows: a peer may compile for minutes
        found = measure_peers(case, args, missing)
        if found:
            row.update(found)
            log.info("%s", _words(row))
            _save(args, done, before)
    return 1 if failed else 0


def _listed(case: "Case", peers: list[str]) -> str:
    from cutlass_kernels import bench_cases

    names = ", ".join(p for p in bench_cases.peers_of(case) if p in peers) or "-"
    return f"{_words(case.row())}  peers: {names}"


def _words(row: dict) -> str:
    return " ".join(f"{k}={v}" for k, v in row.items())


def _save(args: argparse.Namespace, done: list, before: dict | None) -> None:
    if args.out:
        head = envelope([row for _, row in done], args.commit)
        write(args.out, joined(head, before) if before else head)


if __name__ == "__main__":
    sys.exit(main())
