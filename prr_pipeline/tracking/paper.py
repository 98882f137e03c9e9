# SPDX-License-Identifier: Apache-2.0
"""The published numbers that our tables stand beside, and which of our names they belong to.

Everything here is from arXiv 2606.30389v1 (29 June 2026), as printed there: two H100 (tensor
parallel 2), half precision, batch 1; its serial baseline selects, then runs FlashInfer's
BlockSparseAttention. Keys are (model, method).
"""

import re

SOURCE = "arXiv 2606.30389v1"
MODELS = ("GLM-4", "GLM-Z1", "DeepSeek-R1", "Llama3", "Qwen3-14B", "Qwen3-32B")
METHODS = ("Quest", "InfLLM-v2")
BENCHMARKS = ("LongBench", "InfiniteBench", "RULER", "AIME", "MATH500")

# Source: Table 1. Speed-up of PRR over serial DSA: the five BENCHMARKS, then the printed average.
SPEEDUP: dict[tuple[str, str], tuple[float, ...]] = {
    ("GLM-4", "Quest"): (1.50, 1.40, 1.45, 1.30, 1.42, 1.42),
    ("GLM-4", "InfLLM-v2"): (1.64, 1.38, 1.58, 1.62, 1.59, 1.56),
    ("GLM-Z1", "Quest"): (1.48, 1.39, 1.43, 1.33, 1.45, 1.42),
    ("GLM-Z1", "InfLLM-v2"): (1.61, 1.35, 1.61, 1.64, 1.55, 1.55),
    ("DeepSeek-R1", "Quest"): (1.39, 1.42, 1.47, 1.35, 1.39, 1.41),
    ("DeepSeek-R1", "InfLLM-v2"): (1.30, 1.48, 1.61, 1.52, 1.28, 1.44),
    ("Llama3", "Quest"): (1.36, 1.40, 1.41, 1.39, 1.34, 1.38),
    ("Llama3", "InfLLM-v2"): (1.32, 1.45, 1.55, 1.55, 1.30, 1.43),
    ("Qwen3-14B", "Quest"): (1.44, 1.27, 1.41, 1.44, 1.45, 1.40),
    ("Qwen3-14B", "InfLLM-v2"): (1.56, 1.43, 1.51, 1.53, 1.53, 1.51),
    ("Qwen3-32B", "Quest"): (1.26, 1.34, 1.27, 1.27, 1.26, 1.28),
    ("Qwen3-32B", "InfLLM-v2"): (1.35, 1.27, 1.29, 1.32, 1.35, 1.31),
}

# Source: Tables 2 and 8. Speed-up over serial DSA, average of the benchmarks: S1 (reuse),
# S2 (reuse_repair), S3 (prr).
ABLATION: dict[tuple[str, str], tuple[float, float, float]] = {
    ("GLM-4", "Quest"): (1.00, 1.20, 1.41),
    ("GLM-4", "InfLLM-v2"): (1.01, 1.30, 1.56),
    ("GLM-Z1", "Quest"): (1.00, 1.20, 1.42),
    ("GLM-Z1", "InfLLM-v2"): (1.02, 1.31, 1.55),
    ("DeepSeek-R1", "Quest"): (1.01, 1.18, 1.40),
    ("DeepSeek-R1", "InfLLM-v2"): (1.01, 1.22, 1.44),
    ("Llama3", "Quest"): (1.00, 1.17, 1.38),
    ("Llama3", "InfLLM-v2"): (1.01, 1.21, 1.43),
    ("Qwen3-14B", "Quest"): (1.00, 1.19, 1.40),
    ("Qwen3-14B", "InfLLM-v2"): (1.01, 1.28, 1.51),
    ("Qwen3-32B", "Quest"): (1.00, 1.09, 1.28),
    ("Qwen3-32B", "InfLLM-v2"): (1.00, 1.11, 1.32),
}

# Source: Tables 4 and 7. Overlap of the predicted set with A, percent, average of the benchmarks.
OVERLAP_PREDICTED: dict[tuple[str, str], float] = {
    ("GLM-4", "Quest"): 98.05,
    ("GLM-4", "InfLLM-v2"): 97.52,
    ("GLM-Z1", "Quest"): 97.97,
    ("GLM-Z1", "InfLLM-v2"): 98.70,
    ("DeepSeek-R1", "Quest"): 97.75,
    ("DeepSeek-R1", "InfLLM-v2"): 98.86,
    ("Llama3", "Quest"): 98.01,
    ("Llama3", "InfLLM-v2"): 98.14,
    ("Qwen3-14B", "Quest"): 98.12,
    ("Qwen3-14B", "InfLLM-v2"): 98.57,
    ("Qwen3-32B", "Quest"): 98.24,
    ("Qwen3-32B", "InfLLM-v2"): 98.86,
}

# Source: Table 5. Overlap of A with the A of the step before, a fraction.
OVERLAP_LAST: dict[tuple[str, str], float] = {
    ("GLM-4", "Quest"): 0.672,
    ("GLM-4", "InfLLM-v2"): 0.698,
    ("GLM-Z1", "Quest"): 0.697,
    ("GLM-Z1", "InfLLM-v2"): 0.698,
    ("DeepSeek-R1", "Quest"): 0.636,
    ("DeepSeek-R1", "InfLLM-v2"): 0.671,
    ("Llama3", "Quest"): 0.668,
    ("Llama3", "InfLLM-v2"): 0.677,
    ("Qwen3-14B", "Quest"): 0.653,
    ("Qwen3-14B", "InfLLM-v2"): 0.666,
    ("Qwen3-32B", "Quest"): 0.644,
    ("Qwen3-32B", "InfLLM-v2"): 0.655,
}

# Our names, lower-case letters and digits only, matched from their start. Sizes are part of it:
# a 32B GLM-Z1 or a Llama 3.1 is another model than the paper's.
_NAMES = {
    "GLM-4": r"glm4($|9b)",
    "GLM-Z1": r"glmz1($|9b)",
    "DeepSeek-R1": r"deepseekr1($|8b|distillllama8b|0528qwen38b)",
    "Llama3": r"(meta)?llama3($|8b)",
    "Qwen3-14B": r"qwen314b",
    "Qwen3-32B": r"qwen332b",
    "Quest": r"quest",
    "InfLLM-v2": r"infllm",
    "LongBench": r"longbench(e|en|v1)?$",
    "InfiniteBench": r"(infinite|infty|inf)bench",
    "RULER": r"ruler",
    "AIME": r"aime($|24|2024)",
    "MATH500": r"math500",
}


def paper_name(name: str) -> str | None:
    """Return the paper's name for a model, method or benchmark of ours; None if it is not there."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((known for known, form in _NAMES.items() if re.match(form, plain)), None)
