# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what a model is asked, and how its answer is scored; one module each (see base)."""
