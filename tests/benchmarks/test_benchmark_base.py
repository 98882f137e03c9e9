# SPDX-License-Identifier: Apache-2.0
"""The contract of a benchmark, and that each option's YAML file is its class's schema."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from prr_pipeline.benchmarks.base import Benchmark, Sample, read_text, unknown
from prr_pipeline.errors import ConfigError, MissingInput

CONF = Path(__file__).parents[2] / "conf" / "benchmark"


@dataclass(kw_only=True)
class Echo(Benchmark):
    """As little as a benchmark can be."""

    name: str = "echo"
    length: object = 8
    path: str | None = None

    def check(self):
        self._at_least("length", 4)

    def samples(self, count_tokens, seed):
        yield Sample("echo-0", "echo", "say a", "", ("a",), 1)

    def score(self, sample, prediction):
        return float(prediction == sample.answers[0])


def test_a_small_benchmark_works():
    echo = Echo()
    echo.check()
    (sample,) = echo.samples(lambda prompt, prefix: len(prompt), seed=0)
    assert echo.score(sample, echo.postprocess(" a\n")) == 1.0
    assert echo.chat and not echo.ignore_eos and sample.meta == {}


@pytest.mark.parametrize("length", [3, 0, -1, 4.0, "8", True, None])
def test_a_wrong_number_is_refused(length):
    with pytest.raises(ConfigError, match=r"benchmark=echo: length must be a whole number >= 4"):
        Echo(length=length).check()


def test_files_that_are_missing_or_not_text(tmp_path):
    with pytest.raises(MissingInput, match=r"path is not set. Pass benchmark.path=<a book>."):
        Echo()._file("path", "a book")
    with pytest.raises(MissingInput, match=r"no file at .*nowhere.txt \(looked in "):
        Echo(path=str(tmp_path / "nowhere.txt"))._file("path", "a book")
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 2\)"):
        read_text(Echo(path=str(binary))._file("path", "a book"))


def test_unknown_names_get_near_ones():
    text = unknown("task", "niah_sngle_1", ["niah_single_1", "vt"])
    assert text == ("unknown task 'niah_sngle_1'. Did you mean niah_single_1? There are: niah_single_1, vt.")
    assert "mean" not in unknown("task", "zzz", ["vt"])


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_yaml_names_every_field_and_its_default(path):
    option = OmegaConf.load(path)
    kind = get_class(option.pop("_target_"))
    assert issubclass(kind, Benchmark) and option.name == path.stem
    assert dict(option) == {field.name: getattr(kind(), field.name) for field in fields(kind)}


def test_the_shipped_benchmarks_are_there():
    assert {"ruler", "text", "locality"} <= {path.stem for path in CONF.glob("*.yaml")}


def test_the_default_option_makes_samples_from_yaml():
    ruler = instantiate(OmegaConf.load(CONF / "ruler.yaml"), length=600, num_samples=1)
    ruler.check()
    made = list(ruler.samples(lambda prompt, prefix: len((prompt + prefix).split()), seed=0))
    assert [sample.id for sample in made] == ["niah_single_1-600-0000", "vt-600-0000"]
