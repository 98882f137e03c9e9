# SPDX-License-Identifier: Apache-2.0
"""Every template compiles for sm_90a without a GPU, and compiled kernels are kept, checked and shared on disk."""

import fcntl
import inspect
import json
import logging
import subprocess
import sys
import threading

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cutlass_kernels import OPS, cuda, reference, templates
from cutlass_kernels import compile as kc
from cutlass_kernels.templates.append import Append, AppendInfLLM
from cutlass_kernels.templates.attend import Attend
from cutlass_kernels.templates.linear import Linear
from cutlass_kernels.templates.merge import Merge
from cutlass_kernels.templates.norm import Norm
from cutlass_kernels.templates.norm_linear import NormLinear
from cutlass_kernels.templates.repair import Repair
from cutlass_kernels.templates.replay_hits import ReplayHits
from cutlass_kernels.templates.silu_linear import SiluLinear

ROTATED = dict(rope="", rotated=0, group=0)  # before append
SMALL = dict(dtype="bfloat16", head_dim=64, block=16, paged=False, quest=False, **ROTATED)  # compiles fastest
INFLLM = dict(dtype="float16", head_dim=128, block=64, paged=True, fine=32, fine_step=16, coarse=128, coarse_step=64)


def attend(group, block, dtype="bfloat16", head_dim=128, paged=False, **other):
    return Attend, dict(dtype=dtype, head_dim=head_dim, group=group, block=block, paged=paged, **other)


def repair(group, block, capacity=64, **other):
    return Repair, attend(group, block, capacity=capacity, **other)[1]


GRID = [
    attend(16, 64),
    attend(4, 16, paged=True),
    attend(3, 32, "float16"),
    attend(5, 128, head_dim=64),
    attend(8, 256, "float16", 64, paged=True),
    (Merge, dict(dtype="bfloat16", head_dim=128, group=16)),
    (Merge, dict(dtype="float32", head_dim=64, group=3)),
    repair(1, 64, 512),
    repair(4, 16, 256, paged=True),
    repair(5, 32, 128, dtype="float16"),
    repair(8, 16, head_dim=64),
    repair(16, 64),
    (Append, dict(SMALL, quest=True, paged=True, head_dim=128)),
    (Append, dict(SMALL, rope="interleaved", rotated=32, group=3)),
    (AppendInfLLM, dict(INFLLM, **ROTATED)),
    (AppendInfLLM, dict(INFLLM, rope="half", rotated=128, group=16)),
    (Linear, dict(dtype="bfloat16", k=4096, rows=1, split=1, bias=False)),
    (Linear, dict(dtype="float16", k=832, rows=2, split=4, bias=True)),
    (NormLinear, dict(dtype="bfloat16", k=4096, split=1, bias=False)),
    (NormLinear, dict(dtype="float16", k=1024, split=8, bias=True)),
    (NormLinear, dict(dtype="bfloat16", k=576, split=1, bias=True)),
    (SiluLinear, dict(dtype="bfloat16", k=13696, split=1, bias=False)),
    (SiluLinear, dict(dtype="float16", k=192, split=8, bias=True)),
    (SiluLinear, dict(dtype="bfloat16", k=25600, split=1, bias=False)),
    (Norm, dict(dtype="bfloat16", k=4096, adds=True)),
    (Norm, dict(dtype="float16", k=16376, adds=False)),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PRR_KERNEL_CACHE", str(tmp_path / "kernels"))
    kc.forget()
    yield tmp_path / "kernels"
    kc.forget()


@pytest.fixture
def builds(monkeypatch):
    """Names of the templates that were really compiled."""
    seen, build = [], kc.build
    monkeypatch.setattr(
        kc, "build", lambda template, **params: seen.append(template.__name__) or build(template, **params)
    )
    return seen


@pytest.mark.parametrize("template, params", GRID, ids=lambda x: x.__name__ if isinstance(x, type) else "")
def test_compiles_without_a_gpu_and_loads_from_disk(template, params, folder):
    kernel = kc.compiled(template, **params)
    assert callable(kernel) and kc.compiled(template, **params) is kernel
    kc.forget()
    again = kc.compiled(template, **params)
    assert again is not kernel and callable(again)
    record = json.loads(next(folder.glob("*.json")).read_text())
    assert record["template"] == template.__name__ and record["params"] == params and record["arch"] == "sm_90a"


@pytest.mark.parametrize("capacity", Repair.CAPACITIES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", range(1, 17))
def test_a_cta_of_repair_has_room(group, head_dim, capacity):
    r = Repair("bfloat16", head_dim, group, 16, False, capacity)
    assert r.heads * r.cols == r.units * r.COLS == 64 and head_dim % r.cols == 0
    assert r.CREW == r.SETS and capacity % r.at_once == 0 and capacity % r.ROWS == 0
    tiles = r.slots * 64 * (head_dim + r.cols) * 2
    parts = capacity * (r.heads * (r.cols + 1) * 4 + 16) + 2900
    assert tiles + parts < (180 if capacity == 64 else 227) * 1024 and (6 if capacity == 64 else 3) <= r.slots <= 8


@pytest.mark.parametrize("op", sorted(cuda.ROUTES))
def test_the_kernels_of_an_op_take_its_arguments_and_their_defaults(op):
    """torch leaves out an argument that has its default."""
    taken, wanted = (
        [(p.name, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (cuda._load(op), getattr(reference, op))
    )
    assert taken == wanted


def test_repair_is_compiled_again_when_the_shared_arithmetic_changes():
    sources = {p.name for p in kc._sources(Repair)}
    assert sources >= {"repair.py", "missed.py", "tile.py", "tree.py"}
    assert {p.name for p in kc._sources(Merge)} >= {"merge.py", "tree.py"}


def test_a_kernel_that_uses_another_s_functions_depends_on_its_file():
    assert {p.name for p in kc._sources(ReplayHits)} >= {"replay_hits.py", "predict.py", "topk.py"}
    assert {p.name for p in kc._sources(NormLinear)} >= {"norm_linear.py", "linear.py", "norm.py"}
    assert {p.name for p in kc._sources(SiluLinear)} >= {"silu_linear.py", "linear.py", "norm.py"}


def test_a_kept_kernel_is_not_compiled_again(folder, builds):
    kc.compiled(Append, **SMALL)
    kc.forget()
    kc.compiled(Append, **SMALL)
    assert builds == ["Append"]
    kc.compiled(Append, **dict(SMALL, block=32))
    assert builds == ["Append"] * 2
    assert len(list(folder.glob("*.o"))) == 2


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "empty record"])
def test_a_damaged_entry_is_set_aside_and_built_again(folder, builds, caplog, damage):
    kc.compiled(Append, **SMALL)
    kc.forget()
    entry = next(folder.glob("*.o"))
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "empty record":
        entry.with_suffix(".json").write_text("")
    else:
        entry.write_bytes(data if damage == "flipped bit" else data[:100])
    with caplog.at_level(logging.WARNING):
        kc.compiled(Append, **SMALL)
    assert f"{entry.name} is damaged" in caplog.text and "set aside as .bad and compiled again" in caplog.text
    assert entry.with_suffix(".o.bad").exists() and builds == ["Append"] * 2
    kc.forget()
    kc.compiled(Append, **SMALL)
    assert builds == ["Append"] * 2


def test_a_second_process_waits_for_the_lock(folder, builds):
    kc.compiled(Append, **SMALL)
    kc.forget()
    lock = next(folder.glob("*.lock"))
    done = threading.Event()
    worker = threading.Thread(target=lambda: (kc.compiled(Append, **SMALL), done.set()))
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as another process would, through a file of its own
        worker.start()
        assert not done.wait(0.3)
    worker.join(20)
    assert done.is_set() and builds == ["Append"]


def test_without_a_usable_folder_it_compiles_and_says_so(tmp_path, monkeypatch, builds, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PRR_KERNEL_CACHE", str(tmp_path / "file" / "kernels"))
    kc.forget()
    with caplog.at_level(logging.WARNING):
        assert callable(kc.compiled(Append, **SMALL))
    assert "is not usable" in caplog.text and builds == ["Append"]
    monkeypatch.setenv("PRR_KERNEL_CACHE", "")
    kc.forget()
    assert callable(kc.compiled(Append, **SMALL)) and kc.cache_dir() is None
    kc.forget()


def test_the_name_depends_on_all_that_the_kernel_does(monkeypatch, tmp_path):
    name = kc.digest(Append, SMALL)
    assert name == kc.digest(Append, dict(reversed(SMALL.items())))
    assert name != kc.digest(Append, dict(SMALL, block=32)) and name != kc.digest(AppendInfLLM, SMALL)
    sources = kc._sources(Append)
    assert {p.name for p in sources} == {"append.py", "common.py", "compile.py", "__init__.py"}
    changed = tmp_path / "append.py"
    changed.write_text("another source")
    monkeypatch.setattr(kc, "_sources", lambda template: [changed, *sources[1:]])
    assert name != kc.digest(Append, SMALL)
    monkeypatch.undo()
    monkeypatch.setattr(kc, "_versions", lambda: ("nvidia-cutlass-dsl 9.9",))
    assert name != kc.digest(Append, SMALL)


def test_the_default_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("PRR_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kc.cache_dir() == tmp_path / "prr_pipeline" / "kernels"


# ------------------------------------------------------------------------------------------------ cuda.py, templates
def test_every_op_has_a_template_function():
    assert set(cuda.ROUTES) == set(OPS)
    assert all(callable(cuda._load(op)) for op in OPS)


def test_importing_the_ops_costs_no_dsl():
    code = "import cutlass_kernels, sys; print([m for m in sys.modules if m.split('.')[0] in ('cutlass', 'tvm_ffi')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_dsl_an_op_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "cutlass_kernels.templates.merge")
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(ImportError, match="merge: CUDA tensors need CuTe DSL, .* pip install 'nvidia-cutlass-dsl"):
        cuda._load("merge")


def test_an_unserved_value_is_named_with_the_served_ones():
    with pytest.raises(NotImplementedError) as error:
        templates.serve("attend", torch.zeros(1), Attend.SERVES, {"head size": 96})
    assert str(error.value) == "attend: no CUDA kernel for head size 96; served: 64, 128"
    with pytest.raises(NotImplementedError, match="no CUDA kernel for dtype float32; served: bfloat16, float16"):
        templates.serve("attend", torch.zeros(1), Attend.SERVES, {"dtype": torch.float32})


def test_another_gpu_is_refused_in_a_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    templates._unfit.cache_clear()
    with pytest.raises(NotImplementedError) as error:
        templates.serve("attend", torch.zeros(1), Attend.SERVES, {"head size": 64})
    templates._unfit.cache_clear()
    said = "attend: cpu (NVIDIA A100) has compute capability 8.0; the CUDA kernels are for 9.0 (sm_90a)"
    assert str(error.value) == said


def test_doors_check_layout_and_alignment():
    with pytest.raises(ValueError, match=r"attend: k has strides \(1, 4\) for shape \(4, 4\), expected contiguous"):
        templates.door("attend", k=torch.zeros(4, 4).T)
    x = torch.zeros(64)
    x = x[(16 - x.data_ptr() % 16) % 16 // 4 :]
    templates.door("attend", q=x[4:], table=None)
    with pytest.raises(ValueError, match="attend: q starts at an address that is no multiple of 16 bytes"):
        templates.door("attend", q=x[1:])
    templates.contiguous("attend", ids=x[1:])


@pytest.mark.parametrize("n, least, power", [(1, 1, 1), (2, 1, 2), (3, 1, 4), (64, 1, 64), (65, 1, 128), (3, 16, 16)])
def test_sizes_are_rounded_up_to_powers_of_two(n, least, power):
    assert templates.round_up(n, least) == power
